"""A changed model is looked at in its next call, also inside generation and transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from tests.conftest import positions
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LENGTHS = (5, 7)
BOUND = 1e-4
"""Of logits in float32 of order 1: rounding leaves about 1e-6, a leak starts near 1e-2."""


class WithoutTwin(LlamaForCausalLM):
    """A class that nothing but its author can make, so there is no twin of it."""

    def __init__(self, config: Any, more: Any, other: Any):
        super().__init__(config)


class Mine(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * 1.0


def without_twin() -> Any:
    model = tiny.build("llama")
    model.__class__ = WithoutTwin
    return model


def replace_layer(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mine = Mine(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False)
    mine.load_state_dict(mlp.gate_proj.state_dict())
    mlp.gate_proj = mine


def generate(model: Any, ids: torch.Tensor) -> None:
    model.generate(ids, max_new_tokens=3, do_sample=False)


def differentiate(model: Any, ids: torch.Tensor, **given: Any) -> Any:
    def total(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), {"input_ids": ids, "use_cache": False, **given})[
            0
        ].sum()

    return torch.func.grad(total)(dict(model.named_parameters()))


@pytest.mark.parametrize("build", [without_twin, lambda: tiny.build("llama")], ids=["no twin", "twin"])
@pytest.mark.parametrize("first", [generate, differentiate])
@pytest.mark.parametrize("packed", [True, False])
def test_calls_after_it_are_exact(build: Callable[[], Any], first: Callable[..., None], packed: bool):
    model = build().eval()
    ids = tiny.tokens(model.config, 1, sum(LENGTHS))
    with autopack.enable(model) as handle:
        replace_layer(model)
        first(model, ids)
        with torch.no_grad():
            if packed:
                found = model(input_ids=ids, position_ids=positions(LENGTHS)).logits
            else:
                batch = nn.utils.rnn.pad_sequence(ids[0].split(LENGTHS), batch_first=True)
                mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
                found = model(input_ids=batch, attention_mask=mask.long(), use_cache=False).logits[mask][None]
        assert handle.checked.checks > 0
        assert packed or handle.tally.batches == 1
    with torch.no_grad():
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    assert float((found - torch.cat(alone, 1)).abs().max()) < BOUND


def test_a_packed_call_that_cannot_be_checked_here_is_refused_and_only_that_one():
    model = without_twin().eval()
    ids, where = tiny.tokens(model.config, 1, sum(LENGTHS)), positions(LENGTHS)
    with autopack.enable(model):
        replace_layer(model)
        with refused("recorded-call", match="Call it once outside"):
            differentiate(model, ids, position_ids=where)
        assert model(input_ids=ids, position_ids=where, use_cache=False).logits.isfinite().all()
        differentiate(model, ids, position_ids=where)
