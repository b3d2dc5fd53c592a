"""Padded batches of an enabled model give what stock gives and in its shape, without computing padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.calls.hooks import EntryHook
from autopack.calls.part_hooks import PoolerHook
from autopack.family import Numbering
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    PADDED,
    batch,
    build,
    logit_error,
    loss_error,
    mask_of,
    model_gradient_error,
    tally_of,
    twins,
)

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
DECODERS = ["llama", "gemma2", "qwen3_moe", "gpt2", "opt"]
ENCODERS = ["bert", "roberta"]
CASES = [
    *((model_type, "causal LM") for model_type in DECODERS),
    *((model_type, "sequence classification") for model_type in [*DECODERS, *ENCODERS]),
    *((model_type, "token classification") for model_type in ["llama", "gemma2", "qwen3_moe", "gpt2", *ENCODERS]),
    *((model_type, "masked LM") for model_type in ENCODERS),
]
STEPS = 20


llamas = pytest.mark.parametrize("pair", [("llama",)], indirect=True, ids=["llama"])


def _run(model, inputs, **options):
    outputs = model(**inputs, **options)
    outputs.loss.backward()
    return outputs


class TestAgreement:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("case", CASES, ids="-".join)
    def test_logits_loss_and_gradients(self, case, side):
        if case[0] in ENCODERS and case[1] == "sequence classification" and side == "left":
            pytest.skip("the head reads padding: see TestLeftAsItCame")
        stock, model = twins(build(*case))
        inputs = batch(case[1], mask_of(PADDED, side))
        with autopack.enable(model) as handle:
            expected, found = _run(stock, inputs), _run(model, inputs)
            assert found.logits.shape == expected.logits.shape
            assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert loss_error(found.loss, expected.loss) < FLOAT32
            assert model_gradient_error(model, stock) < GRADIENT
            tally = handle.tally
            assert (tally.batches, tally.tokens, tally.padding) == (1, sum(PADDED), 4 * 24 - sum(PADDED))

    @pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "qwen3_moe", "bert", "roberta"])
    def test_holes_in_the_mask_are_padding(self, model_type):
        task = "masked LM" if model_type in ENCODERS else "causal LM"
        stock, model = twins(build(model_type, task))
        inputs = batch(task, mask_of((24, 5, 11, 1), "holes"))
        with autopack.enable(model):
            expected, found = _run(stock, inputs), _run(model, inputs)
            assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert loss_error(found.loss, expected.loss) < FLOAT32
            assert model_gradient_error(model, stock) < GRADIENT
            assert tally_of(model).batches == 1

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"reentrant": False}, {"reentrant": True}], ids=str)
    @pytest.mark.parametrize(
        "case",
        [*((m, "causal LM") for m in DECODERS), ("bert", "sequence classification"), ("bert", "token classification"),
         ("llama", "sequence classification"), ("llama", "question answering"), ("bert", "question answering")],
        ids="-".join,
    )  # fmt: skip
    def test_twenty_optimizer_steps(self, case, settings):
        """Losses agree along the way. The learning rate moves them by several per cent without chaos."""
        stock, model = twins(build(*case))
        accumulate = settings.get("accumulate", 1)
        losses = []
        for which in (stock, model):
            if "reentrant" in settings:
                which.gradient_checkpointing_enable({"use_reentrant": settings["reentrant"]})
            if which is model:
                autopack.enable(model)
            optimizer = torch.optim.SGD(which.parameters(), lr=1e-3)
            found = []
            for step in range(STEPS):
                side = "left" if step % 3 == 2 else "right"
                lengths = [2 + (7 * step + 5 * row) % 23 for row in range(1 + step % 5)]
                inputs = batch(case[1], mask_of(lengths, side), seed=step)
                loss = which(**inputs).loss
                (loss / accumulate).backward()
                if (step + 1) % accumulate == 0:
                    torch.nn.utils.clip_grad_norm_(which.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(loss)
            losses.append(found)
        assert max(loss_error(f, e) for e, f in zip(*losses, strict=True)) < FLOAT32
        autopack.disable(model)

    @llamas
    @pytest.mark.parametrize("rows", [1, 2, 8, 32])
    def test_any_number_of_rows(self, pair, rows):
        stock, model = pair
        lengths = [2 + (5 * row) % 23 for row in range(rows)]
        inputs = batch("causal LM", mask_of(lengths, columns=24))
        expected, found = _run(stock, inputs), _run(model, inputs)
        assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
        assert model_gradient_error(model, stock) < GRADIENT
        assert tally_of(model).batches == 1

    @settings(max_examples=40)
    @given(data=st.data(), side=st.sampled_from(["right", "left", "holes"]))
    def test_any_shape(self, data, side):
        columns = data.draw(st.integers(2, 30))
        lengths = data.draw(st.lists(st.integers(1, columns), min_size=1, max_size=9))
        stock = build("llama")
        mask = mask_of(lengths, side, columns)
        inputs = batch("causal LM", mask)
        stock_logits = stock(**inputs).logits
        with autopack.enable(stock):
            found = stock(**inputs).logits
            with torch.no_grad():
                plain = stock(**inputs).logits
        for each in (found, plain):
            assert logit_error(each, stock_logits, mask) < FLOAT32
        assert not plain[mask == 0].any()
        # Where a loss of labels is differentiated, anything but zeros: who reads it is seen by its gradient.
        first = found[0, mask[0].argmax()]
        assert (found[mask == 0] == first).all()

    @llamas
    def test_two_forwards_before_one_backward(self, pair):
        """As DPO does, here with gradient checkpointing, which must give each its own layout."""
        stock, model = pair
        first, second = (batch("causal LM", mask_of(n), seed=n[0]) for n in ((9, 4, 7), (3, 12)))
        for which in pair:
            which.gradient_checkpointing_enable({"use_reentrant": False})
            (which(**first).loss - 0.5 * which(**second).loss).backward()
        assert model_gradient_error(model, stock) < GRADIENT

    @llamas
    def test_embeddings_and_explicit_positions(self, pair):
        model = pair[1]
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        mask = inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        embedded = []
        for which in pair:
            ids = inputs["input_ids"]
            embedded.append(which.get_input_embeddings()(ids).detach().requires_grad_())
            call = {k: v for k, v in inputs.items() if k != "input_ids"}
            _run(which, call, inputs_embeds=embedded[-1])
        real = mask.bool()
        expected, found = (e.grad[real] for e in embedded)
        assert tally_of(model).batches == 1
        assert ((found - expected).abs().max() / expected.abs().max()).item() < GRADIENT

    @llamas
    def test_loss_over_a_number_of_items(self, pair):
        """Trainer counts the targets of an accumulated batch before the entry."""
        inputs = batch("causal LM", mask_of(PADDED))
        expected, found = (_run(which, inputs, num_items_in_batch=torch.tensor(57)) for which in pair)
        assert loss_error(found.loss, expected.loss) < FLOAT32

    def test_router_loss_of_a_mixture_counts_real_tokens(self):
        stock, model = twins(build("qwen3_moe"))
        inputs = batch("causal LM", mask_of(PADDED))
        with autopack.enable(model):
            expected, found = (_run(which, inputs, output_router_logits=True) for which in (stock, model))
            assert loss_error(found.aux_loss, expected.aux_loss) < FLOAT32
            real = inputs["attention_mask"].bool().reshape(-1)
            for ours, theirs in zip(found.router_logits, expected.router_logits, strict=True):
                assert ours.shape == theirs.shape
                assert (ours[real] - theirs[real]).abs().max() < FLOAT32

    @pytest.mark.exhaustive
    def test_compiled(self):
        stock, model = twins(build("llama", num_hidden_layers=1))
        compiled = torch.compile(model, backend="aot_eager")
        with autopack.enable(model):
            for lengths in ((9, 4, 7), (3, 12), (8, 8, 2, 1)):
                inputs = batch("causal LM", mask_of(lengths, columns=12))
                expected, found = _run(stock, inputs), _run(compiled, inputs)
                assert logit_error(found.logits, expected.logits, inputs["attention_mask"]) < FLOAT32
            assert model_gradient_error(model, stock) < GRADIENT
            assert tally_of(model).batches == 3


class TestNegativeControls:
    """What each precaution is for: without it, the run differs."""

    def test_a_pooler_that_reads_the_packed_row(self, monkeypatch):
        monkeypatch.setattr(PoolerHook, "__call__", lambda self, module, args: None)
        model = build("bert", "sequence classification")
        inputs = batch("sequence classification", mask_of(PADDED))
        with autopack.enable(model, verify=False) as handle:
            model(**inputs)
            assert handle.enabled.pooling  # what it made of one row gave it away, and the batch ran as it came

    def test_columns_as_positions_of_a_model_that_counts_along_the_mask(self):
        stock, model = twins(build("opt"))
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        with autopack.enable(model, check_every=0) as handle:
            assert handle.enabled.traits.knows_padded_positions
            hooks = [h for m in model.modules() for h in m._forward_pre_hooks.values() if isinstance(h, EntryHook)]
            for hook in hooks:
                hook.entry = dataclasses.replace(hook.entry, numbering=Numbering())
            assert logit_error(model(**inputs).logits, stock(**inputs).logits, inputs["attention_mask"]) > 0.1

    def test_labels_of_first_tokens(self):
        """Stock's loss predicts the first token of a left-padded row from padding; that term is left out."""
        stock, model = twins(build("gpt2"))
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        mask, ids = inputs["attention_mask"], inputs["input_ids"]
        unmasked = {**inputs, "labels": ids.masked_fill(mask == 0, -100)}
        with autopack.enable(model):
            assert loss_error(model(**unmasked).loss, stock(**inputs).loss) < FLOAT32
            assert loss_error(model(**unmasked).loss, stock(**unmasked).loss) > 10 * FLOAT32
