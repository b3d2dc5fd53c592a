"""Padded batches of an enabled model give what stock gives and in its shape, without computing
padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    PADDED,
    agree,
    batch,
    build,
    logit_error,
    mask_of,
    tally_of,
    twins,
)

DECODERS = ["llama", "gemma2", "qwen3_moe", "gpt2", "opt"]
ENCODERS = ["bert", "roberta"]
CASES = [
    *((model_type, "causal LM") for model_type in DECODERS),
    *((model_type, "sequence classification") for model_type in [*DECODERS, *ENCODERS]),
    *(
        (model_type, "token classification")
        for model_type in ["llama", "gemma2", "qwen3_moe", "gpt2", *ENCODERS]
    ),
    *((model_type, "masked LM") for model_type in ENCODERS),
]
HOLES = [case for case in CASES if case[0] != "gemma2" and case[1].endswith("LM")]
SIDES = [
    *((case, side) for case in CASES for side in ("right", "left")),
    *((case, "holes") for case in HOLES),
]
FIRST_COLUMN = [((name, "sequence classification"), "left") for name in ENCODERS]
"""Those whose head reads padding: see TestLeftAsItCame."""
llamas = pytest.mark.parametrize("pair", [("llama",)], indirect=True, ids=["llama"])


class TestAgreement:
    @pytest.mark.parametrize(
        ("case", "side"),
        [each for each in SIDES if each not in FIRST_COLUMN],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_logits_loss_and_gradients(self, case, side):
        stock, model = twins(build(*case))
        with autopack.enable(model) as handle:
            agree(model, stock, batch(case[1], mask_of(PADDED, side)))
            tally = handle.tally
            assert (tally.batches, tally.tokens, tally.padding) == (
                1,
                sum(PADDED),
                4 * 24 - sum(PADDED),
            )

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
        # Where a loss of labels is differentiated, anything but zeros: who reads it is seen by its
        # gradient.
        first = found[0, mask[0].argmax()]
        assert (found[mask == 0] == first).all()

    @llamas
    def test_embeddings_and_explicit_positions(self, pair):
        inputs = batch("causal LM", mask_of(PADDED, "left"))
        ids, mask = inputs.pop("input_ids"), inputs["attention_mask"]
        inputs["position_ids"] = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
        embedded = []
        for which in pair:
            embedded.append(which.get_input_embeddings()(ids).detach().requires_grad_())
            which(**inputs, inputs_embeds=embedded[-1]).loss.backward()
        expected, found = (each.grad[mask.bool()] for each in embedded)
        assert tally_of(pair[1]).batches == 1
        assert (found - expected).abs().max() < GRADIENT * expected.abs().max()
