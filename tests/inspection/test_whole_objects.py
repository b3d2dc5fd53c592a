"""A covered model is looked at whole: what is put on its modules, its tensors and into torch counts as other code.

Each thing is put in place before the model is enabled, and after it. What mixes tokens is refused, what does not is
served, and `verify=False` shows that each of the former leaks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopack
from autopack import tiny
from autopack.inspection.process import Process
from tests.support.refusals import refused, refused_by_its_first_call

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LENGTHS = (5, 9, 3, 14)
EXACT, LEAK = 1e-4, 1e-2
"""Of the deviation of logits in float32: rounding leaves about 1e-6, and what leaks here starts near 0.2."""


def documents(model: Any) -> list[torch.Tensor]:
    return [tiny.tokens(model.config, length, seed=length) for length in LENGTHS]


@torch.no_grad()
def alone(model: Any) -> torch.Tensor:
    return torch.cat([model(input_ids=one[None], use_cache=False).logits[0] for one in documents(model)])


@torch.no_grad()
def packed(model: Any) -> torch.Tensor:
    where = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return model(input_ids=torch.cat(documents(model))[None], position_ids=where).logits[0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


def mixed(states: torch.Tensor) -> torch.Tensor:
    """Hands every token something of those before it; states of one token for each row have none."""
    return states + 0.3 * states.cumsum(1) if states.dim() == 3 else states


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], contextlib.AbstractContextManager]:
    def put(model: Any) -> contextlib.AbstractContextManager:
        for layer in model.model.layers:
            del layer.mlp.act_fn
            layer.mlp.act_fn = function
        return contextlib.nullcontext()

    return put


def method(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], contextlib.AbstractContextManager]:
    def put(model: Any) -> contextlib.AbstractContextManager:
        for layer in model.model.layers:
            own = layer.mlp.forward
            layer.mlp.forward = MethodType(lambda self, states, own=own: own(change(states)), layer.mlp)
        return contextlib.nullcontext()

    return put


def module(other: Callable[[], nn.Module]) -> Callable[[Any], contextlib.AbstractContextManager]:
    def put(model: Any) -> contextlib.AbstractContextManager:
        for layer in model.model.layers:
            layer.mlp.act_fn = other()
        return contextlib.nullcontext()

    return put


class PerTensor(torch.Tensor):
    """Weights whose products round what they are multiplied with by its largest number, as quantisation does."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                states, weight, *others = args
                step = states.abs().max() / 7
                return F.linear((states / step).round() * step, weight.as_subclass(torch.Tensor), *others)
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(torch.Tensor):
    """Weights of a type that changes nothing, and that what is computed with them has not."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(args[0], args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def weights(kind: Any) -> Callable[[Any], contextlib.AbstractContextManager]:
    def put(model: Any) -> contextlib.AbstractContextManager:
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.detach().as_subclass(kind))
        return contextlib.nullcontext()

    return put


def replaced(owner: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    @contextlib.contextmanager
    def put(_: Any) -> Iterator[None]:
        own = getattr(owner, name)

        @functools.wraps(own)
        def other(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            return change(found) if isinstance(found, torch.Tensor) and found.is_floating_point() else found

        setattr(owner, name, other)
        try:
            yield
        finally:
            setattr(owner, name, own)

    return put


def everywhere(register: Callable[[Any], Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """A hook on all modules of the process."""

    @contextlib.contextmanager
    def put(_: Any) -> Iterator[None]:
        handle = register(lambda module, args, output: change(output) if isinstance(module, nn.Linear) else None)
        try:
            yield
        finally:
            handle.remove()

    return put


HOOK = nn.modules.module.register_module_forward_hook
ALL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a function as an activation": (activation(lambda x: F.silu(mixed(x))), activation(lambda x: F.silu(x))),
    "torch's own function as an activation": (activation(functools.partial(torch.cumsum, dim=1)), activation(F.silu)),
    "a method of an instance": (method(mixed), method(lambda x: x * 1.0)),
    "a softmax over the tokens": (module(lambda: nn.Softmax(dim=1)), module(nn.SiLU)),
    "a type of weights": (weights(PerTensor), weights(Plain)),
    "F.linear": (replaced(F, "linear", mixed), replaced(F, "linear", lambda x: x * 1.0)),
    "F.silu": (replaced(F, "silu", mixed), replaced(F, "silu", lambda x: x * 1.0)),
    "torch.rsqrt": (replaced(torch, "rsqrt", mixed), replaced(torch, "rsqrt", lambda x: x * 1.0)),
    "Tensor.pow": (replaced(torch.Tensor, "pow", mixed), replaced(torch.Tensor, "pow", lambda x: x * 1.0)),
    "nn.Module.__call__": (
        replaced(nn.Module, "__call__", mixed),
        replaced(nn.Module, "__call__", lambda x: x * 1.0),
    ),
    "a hook on all modules": (everywhere(HOOK, mixed), everywhere(HOOK, lambda x: x * 1.0)),
}


@pytest.mark.parametrize("name", ALL)
def test_what_mixes_tokens_is_refused_before(name):
    model = tiny.build("llama")
    with ALL[name][0](model):
        refused_by_its_first_call(model)
        expected = alone(model)
        with autopack.enable(model, verify=False):
            assert error(packed(model), expected) > LEAK, "the control shows no leak"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ALL)
def test_what_mixes_tokens_is_refused_after(name):
    model = tiny.build("llama")
    with autopack.enable(model):
        for _ in range(4):  # the fifth is checked for no reason but the change
            packed(model)
        with ALL[name][0](model), refused("not-exact", "leak-detected"):
            packed(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_what_mixes_none_is_served(name):
    model = tiny.build("llama")
    with ALL[name][1](model):
        expected = alone(model)
        with autopack.enable(model) as handle:
            assert error(packed(model), expected) <= EXACT
            own = not handle.enabled.is_checked_closely
            assert own == (name == "a softmax over the tokens"), handle.verified  # a SiLU is what its class has


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_what_mixes_none_is_served_after(name):
    model = tiny.build("llama")
    handle = autopack.enable(model)
    packed(model)
    with ALL[name][1](model):
        during = packed(model)
    afterwards = packed(model)
    handle.remove()
    assert error(afterwards, alone(model)) <= EXACT
    with ALL[name][1](model):
        assert error(during, alone(model)) <= EXACT


def test_a_method_that_its_class_calls_by_name_counts_and_any_other_does_not():
    model = tiny.build("bert", task="masked-lm")
    layer = model.bert.encoder.layer[0]
    own = type(layer).feed_forward_chunk
    layer.feed_forward_chunk = MethodType(lambda self, states: own(self, mixed(states)), layer)
    with refused("not-exact"):
        autopack.enable(model)
    del layer.feed_forward_chunk
    model.my_metric = lambda logits: logits.mean()
    with autopack.enable(model) as handle:
        assert not handle.enabled.is_checked_closely


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_none_of_somebody_elses_code(reentrant):
    model = tiny.build("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with autopack.enable(model) as handle:
        assert not handle.enabled.is_checked_closely
    model.gradient_checkpointing_disable()
    with autopack.enable(model) as handle:
        packed(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        packed(model)
        assert not handle.enabled.is_checked_closely


def test_tensors_of_a_type_that_goes_on_to_others_are_not_taken_for_plain_ones():
    model = tiny.build("llama")
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.as_subclass(PerTensor)
    refused_by_its_first_call(model)


CODE = """
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

def helper(states):
    return states * 2

class Callable:
    def __call__(self, states):
        return states * 2

doubled, mixing = Callable(), False

def switched(states):
    return states * 2 + (states.cumsum(1) if mixing else 0)

def closed(function):
    def inner(states):
        return function(states)
    return inner

through = closed(helper)

class ByHelper(LlamaMLP):
    def forward(self, states):
        return super().forward(helper(states))

class ByObject(LlamaMLP):
    def forward(self, states):
        return super().forward(doubled(states))

class BySwitch(LlamaMLP):
    def forward(self, states):
        return super().forward(switched(states))

class ByClosure(LlamaMLP):
    def forward(self, states):
        return super().forward(through(states))

class ByAttribute(LlamaMLP):
    def forward(self, states):
        return super().forward(self.before(states))
"""


@pytest.fixture
def user(tmp_path: Any) -> Iterator[Any]:
    """A module of the user's, in a file."""
    path = tmp_path / "users_layers.py"
    path.write_text(CODE)
    spec: Any = importlib.util.spec_from_file_location("users_layers", path)
    found = importlib.util.module_from_spec(spec)
    sys.modules["users_layers"] = found
    spec.loader.exec_module(found)
    sys.path.insert(0, str(tmp_path))
    yield found
    sys.path.remove(str(tmp_path))
    del sys.modules["users_layers"]


def leaking(states: torch.Tensor) -> torch.Tensor:
    return states * 2 + states.cumsum(1)


def reload_with_a_leak(user: Any, _: Any) -> None:
    with open(user.__file__, "w") as file:
        file.write(CODE.replace("return states * 2\n", "return states * 2 + states.cumsum(1)\n", 1))
    importlib.reload(user)


def of_all_layers(model: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for layer in model.model.layers:
        layer.mlp.before = function


LATER: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "a helper is defined anew": ("ByHelper", lambda user, _: setattr(user, "helper", leaking)),
    "the code of a helper is swapped": (
        "ByHelper",
        lambda user, _: setattr(user.helper, "__code__", leaking.__code__),
    ),
    "its module is loaded again": ("ByHelper", reload_with_a_leak),
    "an object that is called is replaced": ("ByObject", lambda user, _: setattr(user, "doubled", leaking)),
    "its class calls something else": (
        "ByObject",
        lambda user, _: setattr(user.Callable, "__call__", lambda self, states: leaking(states)),
    ),
    "a switch beside it is thrown": ("BySwitch", lambda user, _: setattr(user, "mixing", True)),
    "what a closure holds is swapped": (
        "ByClosure",
        lambda user, _: setattr(user.through.__closure__[0], "cell_contents", leaking),
    ),
    "a function on the layer is replaced": ("ByAttribute", lambda _, model: of_all_layers(model, leaking)),
}


@pytest.mark.parametrize("name", LATER)
def test_what_users_code_calls_is_looked_at_again_when_it_changes(user, name):
    kind, change = LATER[name]
    model = tiny.build("llama")
    for layer in model.model.layers:
        other = getattr(user, kind)(model.config)
        other.load_state_dict(layer.mlp.state_dict())
        layer.mlp = other
    of_all_layers(model, user.helper)
    expected = alone(model)
    with autopack.enable(model):
        for _ in range(4):  # the fifth is checked for no reason but the change
            assert error(packed(model), expected) <= EXACT
        change(user, model)
        with refused("leak-detected"):
            packed(model)


def test_looking_at_torch_again_finds_nothing_where_nothing_changed():
    process = Process({"transformers.models.llama.modeling_llama"})
    assert not process.foreign
    assert not process.changed()
    own, compiling = torch.Tensor.__repr__, torch.compile
    try:
        torch.Tensor.__repr__ = lambda self, **_: "a tensor"  # as packages for looking at tensors do
        torch.compile = lambda *args, **kwargs: compiling(*args, **kwargs)  # as Lightning does
        torch.somebodys_constant = torch.arange(3)  # which compares as tensors do
        assert not process.changed()
    finally:
        torch.Tensor.__repr__, torch.compile = own, compiling
        del torch.somebodys_constant
