"""A covered model is looked at whole: what is put on its modules, its tensors and into torch counts
as other code.

Each thing is put in place before the model is enabled, and after it. What mixes tokens is refused,
what does not is served, and `verify=False` shows that each of the former leaks."""

import functools
from contextlib import ExitStack, contextmanager
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopack
from autopack import tiny
from autopack.inspection.foreign import replaced_in_torch
from tests.engine import Call, check, leaks
from tests.support.refusals import refused, refused_by_its_first_call

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
CALL = Call(labels=None, lengths=(5, 9, 3, 14), given={"use_cache": False})


def mixed(states):
    """Hands every token something of those before it; states of one token for each row have
    none."""
    return states + 0.3 * states.cumsum(1) if states.dim() == 3 else states


def unmixed(states):
    return states * 1.0


def in_layers(put):
    """Put something on the feed-forward network of every layer."""

    def of_all(undo, model, change):
        for layer in model.model.layers:
            put(layer.mlp, change)

    return of_all


@in_layers
def activation(mlp, function):
    del mlp.act_fn
    mlp.act_fn = function


@in_layers
def method(mlp, change):
    own = mlp.forward
    mlp.forward = MethodType(lambda self, states: own(change(states)), mlp)


@in_layers
def module(mlp, other):
    mlp.act_fn = other()


@in_layers
def weights(mlp, kind):
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().as_subclass(kind))


class Plain(torch.Tensor):
    """Weights of a type that changes nothing, and that what is computed with them has not."""

    @staticmethod
    def of(states):
        return states

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(cls.of(args[0]), args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


class PerTensor(Plain):
    """Weights whose products round what they are multiplied with by its largest number, as
    quantisation does."""

    @staticmethod
    def of(states):
        step = states.abs().max() / 7
        return (states / step).round() * step


def replaced(owner, name):
    def put(undo, model, change):
        own = getattr(owner, name)

        @functools.wraps(own)
        def other(*args, **kwargs):
            found = own(*args, **kwargs)
            return (
                change(found)
                if isinstance(found, torch.Tensor) and found.is_floating_point()
                else found
            )

        undo.callback(setattr, owner, name, own)
        setattr(owner, name, other)

    return put


def on_all_modules(undo, model, change):
    """A hook on all modules of the process."""

    def hook(module, args, output):
        return change(output) if isinstance(module, nn.Linear) else None

    undo.callback(nn.modules.module.register_module_forward_hook(hook).remove)


ALL = {
    "a function as an activation": (activation, lambda x: F.silu(mixed(x)), lambda x: F.silu(x)),
    "torch's own function as an activation": (
        activation,
        functools.partial(torch.cumsum, dim=1),
        F.silu,
    ),
    "a method of an instance": (method, mixed, unmixed),
    "a softmax over the tokens": (module, lambda: nn.Softmax(dim=1), nn.SiLU),
    "a type of weights": (weights, PerTensor, Plain),
    "F.linear": (replaced(F, "linear"), mixed, unmixed),
    "F.silu": (replaced(F, "silu"), mixed, unmixed),
    "torch.rsqrt": (replaced(torch, "rsqrt"), mixed, unmixed),
    "Tensor.pow": (replaced(torch.Tensor, "pow"), mixed, unmixed),
    "nn.Module.__call__": (replaced(nn.Module, "__call__"), mixed, unmixed),
    "a hook on all modules": (on_all_modules, mixed, unmixed),
}
"""By what is put in place: how, what mixes tokens, and what does not."""


@contextmanager
def in_place(name, model, *, mixes):
    how, mixing, other = ALL[name]
    with ExitStack() as undo:
        how(undo, model, mixing if mixes else other)
        yield


@pytest.mark.parametrize("name", ALL)
def test_what_mixes_tokens_is_refused_before(name):
    model = tiny.build("llama")
    with in_place(name, model, mixes=True):
        refused_by_its_first_call(model)
        expected = CALL.alone(model)
        with autopack.enable(model, verify=False):
            assert leaks(CALL.packed(model), expected), "the control shows no leak"


@pytest.mark.parametrize("name", ALL)
def test_what_mixes_tokens_is_refused_after(name):
    model = tiny.build("llama")
    with autopack.enable(model):
        # The fifth is checked for no reason but the change. Weights are compared by checks alone:
        # of the eighth call.
        for _ in range(7 if name == "a type of weights" else 4):
            CALL.packed(model)
        with in_place(name, model, mixes=True), refused("not-exact", "leak-detected"):
            CALL.packed(model)


def test_what_changes_beside_a_new_hook_is_noticed_where_no_call_is_checked():
    """A hook alone has no twin run again."""
    model = tiny.build("llama")
    with autopack.enable(model, check_every=0):
        CALL.packed(model)
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        with in_place("F.silu", model, mixes=True), refused("not-exact"):
            CALL.packed(model)


@pytest.mark.parametrize("name", ALL)
def test_what_mixes_none_is_served(name):
    model = tiny.build("llama")
    with in_place(name, model, mixes=False):
        expected = CALL.alone(model)
        with autopack.enable(model) as handle:
            check(CALL.packed(model), expected)
            own = not handle.enabled.is_checked_closely
            # a SiLU is what its class has
            assert own == (name == "a softmax over the tokens"), handle.verified


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
        CALL.packed(model)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        CALL.packed(model)
        assert not handle.enabled.is_checked_closely


def test_tensors_of_a_type_that_goes_on_to_others_are_not_taken_for_plain_ones():
    model = tiny.build("llama")
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.as_subclass(PerTensor)
    refused_by_its_first_call(model)


def test_looking_at_torch_again_finds_nothing_where_nothing_changed(monkeypatch):
    assert not replaced_in_torch()
    compiling = torch.compile
    # as packages for looking at them do
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self, **_: "a tensor")
    # as Lightning does
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compiling(*args, **kwargs))
    # which compares as tensors do
    monkeypatch.setattr(torch, "somebodys_constant", torch.arange(3), raising=False)
    assert not replaced_in_torch()
    # a function keeps its identity when its code is exchanged
    monkeypatch.setattr(torch.nn.functional.silu, "__code__", (lambda x, *_: x).__code__)
    assert replaced_in_torch()
