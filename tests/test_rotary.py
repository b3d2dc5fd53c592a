"""longrope and dynamic NTK choose their frequencies per document."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from autopack.rotary import PerDocumentRotary, row_dependent_rotaries

# Documents of 7, 12, 5 and 9 tokens: two within the original length, two beyond it.
ORIGINAL = 8
HALF = 8  # rotary dimensions of the tiny models, halved


def _scaling(kind: str) -> dict:
    if kind == "dynamic":
        return {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
        "long_factor": [2.0 + i for i in range(HALF)],
        "original_max_position_embeddings": ORIGINAL,
    }


def _model(model_type: str, kind: str):
    config = tiny.config(model_type)
    name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"
    overrides = {name: _scaling(kind)}
    if kind == "dynamic":
        overrides["max_position_embeddings"] = ORIGINAL
    elif hasattr(config, "original_max_position_embeddings"):
        overrides["original_max_position_embeddings"] = ORIGINAL
    return tiny.build(model_type, **overrides)


CASES = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic"), ("mistral", "dynamic")]


@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_packed_equals_alone(model_type, kind):
    model = _model(model_type, kind)
    assert row_dependent_rotaries(model)
    autopack.enable(model)
    report = autopack.audit(model)
    assert report.exact, str(report)


@pytest.mark.parametrize(("model_type", "kind"), CASES)
def test_without_the_choice_per_document_the_same_rows_leak(model_type, kind):
    model = _model(model_type, kind)
    autopack.enable(model)
    for rotary in row_dependent_rotaries(model):
        for number in [n for n, hook in rotary._forward_hooks.items() if isinstance(hook, PerDocumentRotary)]:
            del rotary._forward_hooks[number]
    report = autopack.audit(model, modes=("default",), gradients=False)
    assert report.worst > 1e-3


def test_a_call_that_packs_nothing_keeps_upstreams_choice():
    model = _model("llama", "longrope")
    ids = tiny.tokens(model.config, 2, 12)
    before = model(input_ids=ids).logits
    with autopack.enable(model):
        assert torch.equal(model(input_ids=ids).logits, before)
