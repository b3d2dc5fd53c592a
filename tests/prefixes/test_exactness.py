"""Rows that begin alike give what stock gives them, where that is computed once: outputs, losses and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from autopack.attention import prefixes
from autopack.layout.prefixes import Prefixes
from autopack.proving import kept
from compat.exactness import built, stand_in
from compat.standins import taken_for_kernels
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    build,
    logit_error,
    loss_error,
    model_gradient_error,
    packs_at_once,
    twins,
)
from tests.support.prefixes import group, loss_of_logits, padded, tree

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TYPES = ["llama", "gemma2", "gpt2", "opt", "mixtral", "gemma3_text", "cohere2", "gpt_oss", "falcon", "bloom", "bart"]
HYBRIDS = ["bamba", "qwen3_next", "lfm2"]
EAGER = {"gemma2", "gpt_oss", "bloom"}
"""Types that know no other attention."""


def _both(stock, model, batch, **options):
    """The outputs of stock and of an enabled model, after gradients of the model's loss, or of one of logits."""
    outputs = []
    for each in (stock, model):
        each.zero_grad()
        output = each(**batch, use_cache=False, **options)
        loss = output.loss if output.loss is not None else loss_of_logits(output.logits, batch)
        loss.backward()
        outputs.append((output, loss))
    (expected, wanted), (found, loss) = outputs
    assert loss_error(loss, wanted) < FLOAT32
    assert model_gradient_error(model, stock) < GRADIENT
    return expected, found


class TestAgreement:
    @pytest.mark.parametrize("labels", [True, False], ids=["labels", "loss of logits"])
    @pytest.mark.parametrize("model_type", [*TYPES, *HYBRIDS])
    def test_logits_states_loss_and_gradients(self, model_type, labels):
        stock, model = twins(build(model_type, attn_implementation="eager" if model_type in EAGER else "sdpa").eval())
        batch = padded(tree(), labels=labels)
        with packs_at_once(model) as handle:
            expected, found = _both(stock, model, batch)  # rows whose states are asked for here do not share
            mask = batch["attention_mask"]
            assert logit_error(found.logits, expected.logits, mask) < FLOAT32
            assert handle.tally.training.shared > 40
            assert handle.tally.training.columns + handle.tally.training.shared == int(mask.sum())

    def test_states_of_layers_without_gradients(self):
        stock, model = twins(build("llama").eval())
        batch = padded(tree())
        with autopack.enable(model) as handle, torch.no_grad():
            expected, found = (m(**batch, use_cache=False, output_hidden_states=True) for m in (stock, model))
            assert handle.tally.evaluation.shared > 40
        for state, wanted in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert logit_error(state, wanted, batch["attention_mask"]) < FLOAT32

    @pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
    @pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
    def test_every_backend(self, model_type, backend):
        """Kernels of flash and flex need a GPU: these are stand-ins of their signatures, and no twin proves them."""
        with stand_in(backend):
            model = built(model_type, backend).eval()
            stock = copy.deepcopy(model)
            with packs_at_once(model, verify=False) as handle:
                taken_for_kernels(handle)
                expected, found = _both(stock, model, batch := padded(tree()))
                assert logit_error(found.logits, expected.logits, batch["attention_mask"]) < FLOAT32
                assert handle.tally.training.shared > 40

    @pytest.mark.parametrize("kept", [1, 6, "columns"])
    def test_logits_of_some_columns(self, kept):
        stock, model = twins(build("llama").eval())
        batch = padded([row[:43] for row in group(32, (11, 11, 11))])
        kept = torch.tensor([3, 40, 41]) if kept == "columns" else kept
        with autopack.enable(model) as handle, torch.no_grad():
            expected, found = (each(**batch, use_cache=False, logits_to_keep=kept).logits for each in (stock, model))
            assert torch.allclose(found, expected, atol=1e-5)
            assert handle.tally.evaluation.shared == 64

    @pytest.mark.parametrize("task", ["sequence classification", "token classification", "backbone"])
    def test_heads_and_the_backbone_alone(self, task):
        stock, model = twins(build("llama", task).eval())
        batch = padded(tree())
        with autopack.enable(model) as handle, torch.no_grad():
            expected, found = (each(**batch, use_cache=False)[0] for each in (stock, model))
            assert logit_error(found, expected, batch["attention_mask"]) < FLOAT32
            assert handle.tally.evaluation.shared > 40

    def test_left_padding(self):
        stock, model = twins(build("llama").eval())
        rows = [torch.cat([row[:30], row[-6:]]) for row in group(24, (12, 12, 12))]
        batch = padded([*rows, rows[0][:9]], side="left")
        with packs_at_once(model) as handle:
            expected, found = _both(stock, model, batch)
            assert logit_error(found.logits, expected.logits, batch["attention_mask"]) < FLOAT32
            assert handle.tally.training.shared == 48

    def test_random_trees(self):
        stock, model = twins(build("gemma2", sliding_window=5).eval())  # windows in every other layer

        @settings(max_examples=25, deadline=None)
        @given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 9))
        def check(branches, seed):
            rows = []
            for number, rests in enumerate(branches):
                for row in group(18 + number, rests, seed + number):
                    rows += [row, row[: len(row) // 2 + 1]] if len(rows) % 3 == 0 else [row]
            batch = padded([*rows, rows[0]])
            before = handle.tally.training.shared
            expected, found = _both(stock, model, batch)
            assert logit_error(found.logits, expected.logits, batch["attention_mask"]) < FLOAT32
            assert handle.tally.training.shared > before

        with packs_at_once(model) as handle:
            check()


class TestLeaks:
    """Controls: what would be wrong is seen."""

    def test_nothing_else_moves_with_a_rest(self):
        model = build("llama").eval()
        rows = group()
        changed = [rows[0], *rows[1:]]
        changed[1] = torch.cat([rows[1][:32], tiny.tokens(None, 1, 11, seed=5)[0]])
        with autopack.enable(model) as handle, torch.no_grad():
            one, other = (model(**padded(each), use_cache=False).logits for each in (rows, changed))
            assert handle.tally.evaluation.shared == 2 * 96
        others = [0, 2, 3]
        assert torch.equal(one[others], other[others])
        assert not torch.equal(one[1, 32:], other[1, 32:])

    def test_a_rest_that_sees_another_one_is_apart(self, monkeypatch):
        """The fault: each of three rests of one length sees the next one in its own place."""
        monkeypatch.setattr(Prefixes, "chains", property(lambda self: ((0,), (0, 2), (0, 3), (0, 1))))
        stock, model = twins(build("llama").eval())
        batch = padded(group(32, (6, 6, 6)))
        with autopack.enable(model, verify=False) as handle, torch.no_grad():
            handle.enabled.said_by_twins["prefixes",] = None
            found, expected = (each(**batch, use_cache=False).logits for each in (model, stock))
            assert logit_error(found, expected, batch["attention_mask"]) > 100 * FLOAT32

    def test_the_twin_sees_that_too(self, monkeypatch):
        """With the fault, the twin gives something else, so every row is computed."""

        def mixing(call, shared):
            return by_stretches(call, shared) * 1.01

        by_stretches = prefixes.by_stretches
        monkeypatch.setattr(prefixes, "by_stretches", mixing)
        stock, model = twins(build("llama").eval())
        batch = padded(group())
        kept.forget()
        with autopack.enable(model) as handle, torch.no_grad():
            found, expected = (each(**batch, use_cache=False).logits for each in (model, stock))
            assert logit_error(found, expected, batch["attention_mask"]) < FLOAT32
            assert handle.tally.evaluation.shared == 0
            assert "its twin gives another" in repr(handle)
