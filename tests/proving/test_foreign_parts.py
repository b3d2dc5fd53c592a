"""Parts that people put into models: the first call of the form in which one mixes tokens is refused, and no other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.proving.foreign_parts import MIXING, TOKEN_WISE, Form, Part
from tests.support.refusals import refused


def model_with(kind: type[Part], form: Form) -> Any:
    """A Llama whose first layer has a part in the place of its gate, in the dtype and mode in which the part shows."""
    model = tiny.build("llama", max_position_embeddings=512, use_cache=False)
    width = model.config.hidden_size
    model.model.layers[0].post_attention_layernorm.weight.data *= 3  # some states are outliers
    model.model.layers[0].mlp.gate_proj = kind.make(width, model.config.intermediate_size)
    return model.to(form.dtype).train(form.train)


@pytest.mark.parametrize("kind", [*TOKEN_WISE, *MIXING], ids=lambda kind: kind.__name__)
def test_what_checks_say_of_a_model_with_a_part(kind):
    form = kind.shows
    model = model_with(kind, form)
    half = form.tokens // 2
    ids = tiny.tokens(model.config, form.rows, form.tokens)
    where = torch.cat([torch.arange(half), torch.arange(form.tokens - half)]).expand(form.rows, -1)
    with autopack.enable(model) as handle:
        with refused("leak-detected") if kind.mixes else nullcontext():
            output = model(input_ids=ids, position_ids=where, labels=ids)
            if form.train:
                output.loss.backward()
        assert (handle.checked.checks, handle.checked.leaks) == (1, int(kind.mixes))
        assert not handle.checked.skipped
