"""Gradients that are asked for of the outputs of a padded batch: the loss has them in its graph, as stock's has."""

from functools import partial

import numpy as np
import pytest
import torch

import autopack
from autopack import tiny
from autopack.layout.token_map import TokenMap
from tests.conftest import LEAK
from tests.support.padded import (
    GRADIENT,
    PADDED,
    batch,
    build,
    mask_of,
    model_gradient_error,
    packs_at_once,
    tally_of,
    twins,
)

KINDS = ["llama", "gpt2", "qwen2_moe", "mamba", "bloom"]
PADDING = TokenMap.of_real(np.array([[1, 1, 0], [1, 1, 1]], bool), torch.device("cpu"))


def _twins(model_type, task="causal LM"):
    """A stock model and one to be enabled, with the same parameters."""
    stock = tiny.build(model_type, task="seq2seq") if task == "pair" else build(model_type, task, "eager")
    if model_type == "qwen2_moe":
        stock.config.output_router_logits = True  # a way from the parameters to the loss that passes no logits
    return twins(stock)


@pytest.fixture(params=KINDS)
def pair(request):
    stock, model = _twins(request.param)
    with autopack.enable(model):
        yield stock, model
        assert tally_of(model).batches


def _call(model, **options):
    model.zero_grad(set_to_none=True)
    inputs = batch("causal LM", mask_of(PADDED))
    return model(**inputs, use_cache=False, output_hidden_states=True, **options)


@pytest.mark.parametrize("kind", ["llama", "blenderbot"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_states_beside_a_loss_do_not_stop_checkpoints(kind, reentrant):
    """A reentrant checkpoint runs in no pass that asks for single gradients, and nobody asks for those of states."""
    stock, model = pair = _twins(kind)
    with autopack.enable(model):
        for which in pair:
            which.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for _ in range(3):
            for which in pair:
                _call(which).loss.backward()
            assert model_gradient_error(model, stock) < GRADIENT
        assert tally_of(model).batches


def _error(found, expected):
    """Largest difference at real tokens, relative to the largest entry; padding gets no gradient that matters."""
    real = mask_of(PADDED).bool()
    return float((found - expected)[real].abs().max() / expected[real].abs().max())


OF = {
    "logits": lambda output: output.logits,
    "states of a layer": lambda output: output.hidden_states[1],
}


REAL_TOKENS = mask_of(PADDED)[..., None]


def _asked(output, of):
    (gradient,) = torch.autograd.grad(output.loss, of(output), retain_graph=True)
    output.loss.backward()
    return gradient


def _retained(output, of=OF["logits"]):
    of(output).retain_grad()
    (2 * output.loss).backward()
    return of(output).grad


def _changed_by_a_hook(output):
    output.logits.register_hook(lambda gradient: gradient * 3)
    output.loss.backward()


def _beside_a_loss_of_ones_own(output):
    output.logits.retain_grad()
    (output.loss + 0.1 * (output.logits * REAL_TOKENS).pow(2).mean()).backward()
    return output.logits.grad


def _one_after_another(output):
    """What the first loss has sent to the logits is none of the second's."""
    torch.autograd.grad(output.loss, output.logits, retain_graph=True)
    (output.logits * REAL_TOKENS).pow(2).mean().backward(retain_graph=True)
    output.loss.backward()


def _changed_in_place(output):
    output.loss.div_(2)
    output.loss.backward()
    output.logits.mul_(2)


def _norm_of_a_gradient(output):
    """A gradient of gradients."""
    (slope,) = torch.autograd.grad(output.loss, output.logits, create_graph=True)
    (output.loss + slope.pow(2).sum()).backward()


USES = {f"{how.__name__} {name}": partial(how, of=of) for how in (_asked, _retained) for name, of in OF.items()} | {
    how.__name__: how
    for how in (
        _changed_by_a_hook,
        _beside_a_loss_of_ones_own,
        _one_after_another,
        _changed_in_place,
        _norm_of_a_gradient,
    )
}


@pytest.mark.parametrize("use", USES.values(), ids=[*USES])
def test_gradients_however_outputs_are_used(pair, use):
    expected, found = (use(_call(which)) for which in pair)
    assert expected is None or _error(found, expected) < GRADIENT
    assert model_gradient_error(*reversed(pair)) < GRADIENT


def test_without_being_taken_out_it_would_count_twice(monkeypatch):
    stock, model = _twins("llama")
    with autopack.enable(model):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", iter(range(1000)).__next__)
        for which in (stock, model):
            _retained(_call(which))
    assert model_gradient_error(model, stock) > LEAK


TASKS = [
    ("llama", "causal LM"),
    ("gemma3_text", "causal LM"),
    ("qwen2_moe", "causal LM"),
    ("mamba", "causal LM"),
    ("bert", "masked LM"),
    ("bert", "token classification"),
    ("bert", "sequence classification"),
    ("t5", "pair"),
    ("bart", "pair"),
]
HOOKS = {"observes": lambda gradient: None, "changes": lambda gradient: gradient * 2}
COMMON = (24, 20, 22, 21)
"""Documents that have their first sixteen tokens in common, where they have any."""


def _inputs(task, lengths, labels):
    mask = mask_of(lengths)
    inputs = batch("causal LM" if task == "pair" else task, mask)
    if lengths is COMMON:
        inputs["input_ids"][:, :16] = inputs["input_ids"][0, :16]
    if task == "pair":
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(0)
        inputs["decoder_attention_mask"] = mask.flip(0)
        inputs["labels"] = inputs["decoder_input_ids"].masked_fill(mask.flip(0) == 0, -100)
    if not labels:
        inputs = {name: value for name, value in inputs.items() if name in _WITHOUT}
    return inputs | ({"use_cache": False} if task in ("causal LM", "pair") else {})


_WITHOUT = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}


def _states(output):
    """All outputs of a call that have a gradient, by their names and places."""
    for name, value in output.items():
        for number, part in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(part, torch.Tensor) and part.requires_grad and part.dim():
                yield f"{name}[{number}]", part


def _seen(model, inputs, hook):
    """What hooks see, of real tokens, when a loss is differentiated whose outputs nobody holds any more."""
    model.zero_grad(set_to_none=True)
    output = model(**inputs, output_hidden_states=True)
    seen = {}
    for name, value in _states(output):
        value.register_hook(lambda gradient, name=name: (seen.update({name: gradient}), hook(gradient))[1])
    real = inputs["attention_mask"].bool()
    of_decoder = inputs.get("decoder_attention_mask", real).bool()
    loss, logits = output.loss, output.logits
    if "labels" not in inputs:
        states = output.get("hidden_states") or output.decoder_hidden_states
        loss = (logits[of_decoder] if logits.dim() == 3 else logits).pow(2).mean() + states[1][of_decoder].sum()
    del output, value, logits
    loss.backward()
    for name, gradient in seen.items():
        mask = real if name.startswith(("enc", "hid")) else of_decoder
        if gradient.shape[:2] == mask.shape:
            seen[name] = gradient[mask]
        elif len(gradient) == mask.numel():
            seen[name] = gradient[mask.reshape(-1)]
    return seen


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "own loss"])
@pytest.mark.parametrize("lengths", [PADDED, COMMON], ids=["padded", "begin alike"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize(("model_type", "task"), TASKS)
def test_hooks_on_all_outputs_see_what_they_see_of_stock(model_type, task, hook, lengths, labels):
    stock, model = _twins(model_type, task)
    inputs = _inputs(task, lengths, labels)
    expected = _seen(stock, inputs, hook)
    with packs_at_once(model):
        found = _seen(model, inputs, hook)
        assert tally_of(model).batches
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < GRADIENT * float(gradient.abs().max()), name
    assert model_gradient_error(model, stock) < GRADIENT


def test_states_that_are_asked_for_keep_rows_apart_and_only_they_do():
    model = build("llama")
    inputs = _inputs("causal LM", COMMON, labels=True)
    with autopack.enable(model) as handle:
        model(**inputs)
        assert handle.tally.training.shared
        assert not handle.tally.apart
        model(**inputs, output_hidden_states=True)
        assert any("hidden states are asked for" in reason for reason in handle.tally.apart)
        with torch.no_grad():
            model(**inputs, output_hidden_states=True)
        assert sum(handle.tally.apart.values()) == 1
