"""Every model type that autopack serves: padded batches, unpadded inside, give what stock gives."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import registry, tiny
from tests.padded import FLOAT32, LENGTHS, batch, logit_error, loss_error, mask_of


def _types() -> list[str]:
    served = frozenset().union(*(family.model_types for family in registry.families()))
    return sorted(served & set(tiny.causal_lm_types()))


@pytest.mark.parametrize("model_type", _types())
def test_logits_and_loss_of_every_type(model_type):
    """Left out, and so equal by themselves, are only those whose positions or windows count the padding."""
    try:
        model = tiny.build(model_type, attn_implementation="sdpa")
    except tiny.CannotBuild:
        model = tiny.build(model_type)
    for side in ("right", "left", "holes"):
        mask = mask_of(LENGTHS, side)
        inputs = batch("causal LM", mask)
        with torch.no_grad():
            expected = model(**inputs, use_cache=False)
            with autopack.enable(model) as handle:
                found = model(**inputs, use_cache=False)
                assert logit_error(found.logits, expected.logits, mask) < FLOAT32
                assert loss_error(found.loss, expected.loss) < FLOAT32
                tally = handle.tally
        if side == "right":
            assert (tally.batches, tally.left) == (1, {})
        elif not tally.batches:
            (reason,) = tally.left
            assert ("windows count it" in reason and side == "holes") or "counts" in reason
