"""Hooks on parts of a model that look at rows and columns: padded batches keep their padding, and
say why."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import autopack
from tests.engine import counted
from tests.subjects import layers_of
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    PADDED,
    agree,
    batch,
    build,
    loss_error,
    mask_of,
    model_gradient_error,
    tally_of,
)
from tests.support.padded import twins as twins_of
from tests.support.refusals import refused

KINDS = ["llama", "gpt2", "mamba", "bloom", "bert", "qwen3_moe", "opt", "gemma2"]


def _twins(model_type):
    task = "masked LM" if model_type == "bert" else "causal LM"
    return twins_of(build(model_type, task, attn_implementation="eager")), batch(
        task, mask_of(PADDED)
    )


def _features(output):
    states = output[0] if isinstance(output, tuple) else output
    return states[:, -1].pow(2).mean()  # of the last column of every row


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("model_type", KINDS)
def test_a_loss_of_the_states_of_a_layer(model_type, when):
    (stock, model), inputs = _twins(model_type)
    found = {}
    for which in (stock, model):

        def look(module, args, output, which=which):
            found[which] = _features(output)

        if when == "after" and which is model:
            autopack.enable(model)
        layers_of(which)[0].register_forward_hook(look)
        if when == "before" and which is model:
            autopack.enable(model)
        loss = (
            which(**inputs, use_cache=False).loss if model_type != "bert" else which(**inputs).loss
        )
        (loss + 0.1 * found[which]).backward()
    assert loss_error(found[model], found[stock]) < FLOAT32
    assert model_gradient_error(model, stock) < GRADIENT
    (reason,) = tally_of(model).left
    assert "a hook on it is test_a_loss_of_the_states_of_a_layer" in reason
    autopack.disable(model)


def test_when_the_hook_is_gone_batches_run_without_their_padding_again():
    (_, model), inputs = _twins("llama")
    with autopack.enable(model):
        model(**inputs)
        hook = layers_of(model)[0].register_forward_hook(lambda *_: None)
        model(**inputs)
        hook.remove()
        model(**inputs)
        assert (tally_of(model).batches, sum(tally_of(model).left.values())) == (2, 1)


def test_a_hook_that_only_asks_for_gradients_looks_at_nothing():
    """Scripts with adapters put it on the embeddings, so that checkpointed layers have something to
    differentiate."""

    def make_inputs_require_grad(module, args, output):
        output.requires_grad_(True)

    (stock, model), inputs = _twins("llama")
    with autopack.enable(model):
        for which in (stock, model):
            which.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
        agree(model, stock, inputs)
        assert tally_of(model).batches == 1


def test_without_being_looked_for_the_hook_sees_one_row():
    (_, model), inputs = _twins("llama")
    shapes = []
    with autopack.enable(model, verify=False):
        layers_of(model)[0].register_forward_hook(
            lambda _, args, output: shapes.append(args[0].shape[:2])
        )
        model(**inputs)
    assert shapes == [(1, sum(PADDED))]


def test_threads_wait_for_the_check_of_a_hook():
    (_, model), _ = _twins("llama")
    ids, where = torch.arange(9)[None], counted((4, 5))
    layers_of(model)[0].mlp.register_forward_hook(
        lambda module, args, output: torch.roll(output, 1, dims=1)
    )

    def run(_):
        with refused("leak-detected"):
            model(input_ids=ids, position_ids=where)

    with autopack.enable(model), ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))


def test_a_hook_on_one_of_several_ranks_is_never_proven_by_a_run_of_the_model(monkeypatch):
    """Ranks that gather parameters would wait for each other: the model is run at calls 1, 2, 4, 8
    and so on alone."""
    model = build("llama", "causal LM").train()
    autopack.enable(model)
    inputs = {
        "input_ids": torch.arange(3, 15)[None],
        "position_ids": torch.arange(6).repeat(2)[None],
    }
    monkeypatch.setattr("autopack.calls.hooks.in_a_group", lambda: True)
    monkeypatch.setattr("autopack.calls.hooks.gathering_groups", lambda root: (object(),))
    before = [model(**inputs).logits for _ in range(2)]
    runs = Counter()
    layers_of(model)[0].register_forward_hook(lambda module, args, output: runs.update(["layer"]))
    assert torch.equal(model(**inputs).logits, before[0])  # the third
    assert runs["layer"] == 1
