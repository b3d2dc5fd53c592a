"""A site sees the layout of its own forward: under checkpointing, in threads, after errors; else it
raises."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.utils import _apply_to_tensors
from torch.utils.checkpoint import checkpoint

import autopack
from autopack import UnsupportedModel
from autopack.errors import OutsideForward
from autopack.runtime.scope import BoundCheckpoint, ambient, bind_checkpointing, current
from tests.conftest import (
    FLOAT64,
    LEAK,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    spans,
    weights_like,
)
from tests.runtime.test_interrupts import raising
from tests.support.one_llama import IDS, is_exact, logits
from tests.support.refusals import refused

KINDS = {"reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="module")
def stock():
    return llama()


@pytest.fixture
def model():
    """Not audited anew for the hooks that tests put on, so that these see no calls but those of the
    test."""
    model = llama()
    with autopack.enable(model, verify=False):
        yield model


def _total(found):
    return (found * weights_like(found)).sum()


def _two_forwards_one_backward(model):
    """Forwards of two layouts, then one backward through both."""
    one, other = (logits(model, n) for n in (LENGTHS, OTHER_LENGTHS))
    (_total(one) + _total(other)).backward()
    return gradients(model)


def _expected(stock):
    (_total(alone(stock, IDS, LENGTHS)) + _total(alone(stock, IDS, OTHER_LENGTHS))).backward()
    return gradients(stock)


def _by_transformers(kind):
    return lambda model: model.gradient_checkpointing_enable(kind)


def _by_torch(kind):
    return partial(
        apply_activation_checkpointing,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=kind),
        check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer",
    )


CHECKPOINTED = {
    **{name: _by_transformers(kind) for name, kind in KINDS.items()},
    "torch, reentrant": _by_torch(CheckpointImpl.REENTRANT),
    "torch, non-reentrant": _by_torch(CheckpointImpl.NO_REENTRANT),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHECKPOINTED.values(), ids=CHECKPOINTED)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_checkpointed_layers_are_recomputed_with_the_layout_of_their_forward(
    implementation, change, when
):
    model = llama(implementation).train()
    if when == "before":
        change(model)
    with autopack.enable(model):
        if when == "after":
            change(model)
        model.enable_input_require_grads()
        found = _two_forwards_one_backward(model)
        assert gradient_error(found, _expected(llama(implementation))) <= FLOAT64
    assert not any(
        isinstance(value, BoundCheckpoint) for m in model.modules() for value in vars(m).values()
    )


def test_checkpointing_that_is_switched_on_between_two_forwards_is_followed(model, stock):
    model.train()
    one = logits(model)
    model.gradient_checkpointing_enable(KINDS["non-reentrant"])
    other = logits(model, OTHER_LENGTHS)
    (_total(one) + _total(other)).backward()
    assert gradient_error(gradients(model), _expected(stock)) <= FLOAT64


@every_kind
def test_a_checkpoint_function_that_is_not_bound_raises(model, kind, monkeypatch):
    monkeypatch.setattr("autopack.calls.hooks.bind_checkpointing", lambda modules: None)
    model.train().gradient_checkpointing_enable(kind)
    bind_checkpointing(list(model.modules()), bound=False)
    with refused("past-the-entry"):
        _two_forwards_one_backward(model)


@every_kind
def test_disabling_between_a_checkpointed_forward_and_its_backward_raises(kind):
    model = llama().train()
    model.gradient_checkpointing_enable(kind)
    with autopack.enable(model):
        loss = _total(logits(model))
    with refused("disabled-before-backward"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_on_a_layer_is_refused(model, reentrant):
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda states, **options: checkpoint(
        partial(forward, **options), states, use_reentrant=reentrant
    )
    # It is noticed at the call, and audited where that is asked for.
    with pytest.raises((OutsideForward, UnsupportedModel), match="checkpoint"):
        _total(logits(model)).backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_foreign_checkpoint_around_the_whole_model_is_exact(model, stock, reentrant):
    def run(lengths, weight):
        return _total(logits(model, lengths)) * weight

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    losses = [
        checkpoint(run, lengths, weight, use_reentrant=reentrant)
        for lengths in (LENGTHS, OTHER_LENGTHS)
    ]
    sum(losses).backward()
    assert gradient_error(gradients(model), _expected(stock)) <= FLOAT64


def _call_a_layer(model):
    states = model.get_input_embeddings()(IDS)
    rotary = model.model.rotary_emb(states, positions(LENGTHS))
    model.model.layers[0](states, position_embeddings=rotary)


def test_a_layer_that_is_called_past_the_entry_raises(model):
    with refused("past-the-entry"):
        _call_a_layer(model)


def test_calling_a_layer_inside_the_forward_of_another_model(model):
    other, failures = llama(), []

    def call_a_layer(*_):
        with refused("past-the-entry"):
            _call_a_layer(model)
        failures.append(True)

    other.lm_head.register_forward_pre_hook(call_a_layer)
    with autopack.enable(other):
        other(input_ids=IDS, position_ids=positions(LENGTHS))
    assert failures


@pytest.mark.parametrize("seed", [0, 1], ids=["the same model", "another"])
def test_a_forward_inside_a_forward_has_its_own_layout(model, stock, seed):
    inner = []

    def call(*_):
        if not inner:
            inner.append(None)
            inner[0] = logits(teacher, OTHER_LENGTHS)

    teacher = llama(seed=seed) if seed else model
    with autopack.enable(teacher):
        hook = model.model.layers[1].register_forward_pre_hook(call)
        outer = logits(model)
        hook.remove()
    assert error(outer, alone(stock, IDS, LENGTHS)) <= FLOAT64
    assert error(inner[0], alone(llama(seed=seed), IDS, OTHER_LENGTHS)) <= FLOAT64


def _interrupt(model, place, kind):
    # A hook on the model is audited, which it raises in.
    with (
        raising(model.get_submodule(place), kind, "before"),
        pytest.raises((kind, UnsupportedModel), match="planted"),
    ):
        logits(model)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize(
    "place", ["model.embed_tokens", "model.layers.0.mlp", "model.layers.1.self_attn", "lm_head", ""]
)
def test_what_an_interrupted_forward_leaves_behind_is_never_used(model, stock, place, kind):
    """torch skips exit hooks for a KeyboardInterrupt."""
    packed = {"input_ids": IDS, "position_ids": positions(LENGTHS), "use_cache": False}
    leaking = stock(**packed).logits
    for _ in range(2):
        _interrupt(model, place, kind)
    assert torch.equal(stock(**packed).logits, leaking)
    assert error(logits(model, OTHER_LENGTHS), alone(stock, IDS, OTHER_LENGTHS)) <= FLOAT64
    _interrupt(model, place, kind)
    assert torch.equal(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)
    _interrupt(model, place, kind)
    with refused("past-the-entry"):
        _call_a_layer(model)
    found = model.model(input_ids=IDS, position_ids=positions(OTHER_LENGTHS)).last_hidden_state
    expected = [
        stock.model(input_ids=IDS[:, a:b]).last_hidden_state for a, b in spans(OTHER_LENGTHS)
    ]
    assert error(found, torch.cat(expected, dim=1)) <= FLOAT64
    _interrupt(model, place, kind)
    with refused("declaration-invalid"):
        model(input_ids=IDS, position_ids=positions(LENGTHS).float())
    assert current() is None


def test_only_the_frame_of_a_forward_tells_what_an_interrupt_left_behind(model, monkeypatch):
    _interrupt(model, "model.embed_tokens", KeyboardInterrupt)
    with monkeypatch.context() as patched:
        patched.setattr("autopack.runtime.scope.current", lambda: ambient.activation)
        _call_a_layer(model)  # in the scope of a forward that is no more
    with refused("past-the-entry"):
        _call_a_layer(model)


def test_no_tensor_of_a_finished_forward_is_kept(model):
    ids = IDS.clone()
    output = model(input_ids=ids, position_ids=positions(LENGTHS))
    watched = [weakref.ref(ids), weakref.ref(output.logits)]
    del ids, output
    gc.collect()
    assert [w() for w in watched] == [None, None]


def test_without_autopack_the_gradients_of_packed_rows_are_wrong(stock):
    model = llama().train()
    assert gradient_error(_two_forwards_one_backward(model), _expected(stock)) > LEAK


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_layers_are_handed_stays_where_fsdp2_casts_it(implementation):
    """FSDP2 in mixed precision makes anew each dataclass among the arguments, and its tensors."""
    model, stock = llama(implementation), llama(implementation)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, *given: _apply_to_tensors(lambda tensor: tensor, given),
            with_kwargs=True,
        )
    with torch.no_grad(), autopack.enable(model):
        assert is_exact(model, stock)
