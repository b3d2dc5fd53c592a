"""What third-party code reads is changed after `enable`: the next call, or the next checked one,
raises."""

import importlib
import sys
from pathlib import Path

import pytest

import autopack
from autopack import tiny
from autopack.inspection.code import ModelCode
from tests.engine import Call, check, leaks
from tests.support.refusals import refused, refused_by_its_first_call

CALL = Call(labels=None, given={"use_cache": False})
CODE = """
import functools
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

def same(x): return x
def mix(x): return x + x.cumsum(1)

def closed(function):
    def inner(x): return function(x)
    return inner

class Helper:
    rate = 0
    def scale(self, x): return x
    def __call__(self, x): return x + self.rate * x.cumsum(1)

helper, called = Helper(), Helper()
through = closed(same)
ACTS = {"x": same}
number, tensor = 0, torch.zeros(1)

def by_default(x, act=same): return act(x)

class Mine(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.fns, self.alpha = {"act": same}, 0
        self.part = functools.partial(self.partial, act=same)
        self.hidden = [nn.Identity()]
    @staticmethod
    def partial(x, act): return act(x)
    def forward(self, x):
        x = self.apply_all(x)
        return super().forward(x)
"""


def load_again(user, _):
    path = Path(user.__file__)
    path.write_text(
        path.read_text().replace("def same(x): return x\n", "def same(x): return x + x.cumsum(1)\n")
    )
    importlib.reload(user)


NOTICED = {
    "defaults": ("by_default(x)", lambda u, m: setattr(u.by_default, "__defaults__", (u.mix,))),
    "a function": ("same(x)", lambda u, m: setattr(u, "same", u.mix)),
    "its module is loaded again": ("same(x)", load_again),
    "an object that is called": ("called(x)", lambda u, m: setattr(u, "called", u.mix)),
    "what its class calls": (
        "called(x)",
        lambda u, m: setattr(u.Helper, "__call__", lambda self, x: u.mix(x)),
    ),
    "code": ("same(x)", lambda u, m: setattr(u.same, "__code__", u.mix.__code__)),
    "a method of its class": (
        "helper.scale(x)",
        lambda u, m: setattr(u.Helper, "scale", lambda self, x: u.mix(x)),
    ),
    "a builtin is shadowed": ("sum([x])", lambda u, m: setattr(u, "sum", lambda xs: u.mix(xs[0]))),
}
"""What stands in modules, classes and functions: it is compared at each call."""
CHECKED = {
    "a dict on the layer": ("self.fns['act'](x)", lambda u, m: m.fns.update(act=u.mix)),
    "what a closure holds": (
        "through(x)",
        lambda u, m: setattr(u.through.__closure__[0], "cell_contents", u.mix),
    ),
    "an attribute of an object that is called": (
        "called(x)",
        lambda u, m: setattr(u.called, "rate", 1),
    ),
    "keywords of a partial": ("self.part(x)", lambda u, m: m.part.keywords.update(act=u.mix)),
    "a hook on a module in a list": (
        "self.hidden[0](x)",
        lambda u, m: m.hidden[0].register_forward_hook(lambda _, args, out: u.mix(out)),
    ),
    "a global number": ("x + number * x.cumsum(1)", lambda u, m: setattr(u, "number", 1)),
    "an attribute that was not there": (
        "mix(x) if getattr(self, 'other', None) else x",
        lambda u, m: setattr(m, "other", True),
    ),
    "a tensor, in place": ("x + tensor * x.cumsum(1)", lambda u, m: u.tensor.add_(1)),
}
"""Values, what containers and objects hold, and members that were not there: a check of a call
tells."""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Make a module of the user's, in a file, whose layers compute an expression first."""

    def make(expression):
        (tmp_path / "users_code.py").write_text(
            CODE + f"    def apply_all(self, x): return {expression}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module("users_code")

    yield make
    sys.modules.pop("users_code", None)


def built(user):
    model = tiny.build("llama").eval()
    for layer in model.model.layers:
        other = user.Mine(model.config)
        other.load_state_dict(layer.mlp.state_dict())
        layer.mlp = other
    return model


@pytest.mark.parametrize("kind", [*NOTICED, *CHECKED])
def test_the_next_call_is_exact_or_refused(user, kind):
    """After two calls the next one that is checked in any case is the fourth."""
    expression, change = (NOTICED | CHECKED)[kind]
    code = user(expression)
    model = built(code)
    expected = CALL.alone(model)
    with autopack.enable(model):
        for _ in range(2 if kind in NOTICED else 3):
            check(CALL.packed(model), expected)
        for layer in model.model.layers:
            change(code, layer.mlp)
        with refused("not-exact", "leak-detected"):
            CALL.packed(model)
    with autopack.enable(model, verify=False):  # where nothing looks, it leaks
        assert leaks(CALL.packed(model), CALL.alone(model))


@pytest.mark.parametrize(
    "expression",
    ["(ACTS.update(calls=[]), x)[1]", "(setattr(self, 'alpha', self.alpha + 1), x)[1]"],
)
def test_state_that_changes_at_every_call_is_no_change_for_ever(user, expression):
    model = built(user(expression))
    expected = CALL.alone(model)
    with autopack.enable(model) as handle:
        for _ in range(12):
            check(CALL.packed(model), expected)
        before = handle.checked.checks
        for _ in range(3):  # calls 13 to 15
            check(CALL.packed(model), expected)
        assert handle.checked.checks == before


def test_a_class_that_exec_has_made_is_the_users(user):
    """Its `__module__` is "builtins", where nothing has a name."""
    namespace = {"LlamaMLP": user("x").LlamaMLP}
    exec(
        "class Own(LlamaMLP):\n    def forward(self, x): return super().forward(x + x.cumsum(1))",
        namespace,
    )
    assert namespace["Own"].__module__ == "builtins"
    model = tiny.build("llama").eval()
    model.model.layers[0].mlp = namespace["Own"](model.config)
    refused_by_its_first_call(model)


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "gpt_bigcode", "mixtral"])
def test_what_transformers_is_built_on_is_no_third_party_code(model_type):
    """Names lead from models to functions that save weights, and to errors of other packages."""
    code = ModelCode(tiny.build(model_type), ["sdpa", "eager"])
    assert (code.foreign, code.hook, code.onlooker) == ([], None, None)
