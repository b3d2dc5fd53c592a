"""Pipelines: stages of an enabled model are refused where documents would be unknown to them, and never leak."""

from __future__ import annotations

import pytest
from torch import nn

import autopack
from tests.conftest import FLOAT64, LEAK, LENGTHS, alone, error, llama, positions, token_ids
from tests.support.refusals import refused

pipelining = pytest.importorskip("torch.distributed.pipelining")
IDS = token_ids()
PACKED = {"input_ids": IDS, "position_ids": positions(LENGTHS)}


class First(nn.Module):
    """The stage that holds the embedding and the first layer of a model."""

    def __init__(self, model):
        super().__init__()
        self.embed, self.rotary, self.layer = model.model.embed_tokens, model.model.rotary_emb, model.model.layers[0]

    def forward(self, input_ids, position_ids):
        states = self.embed(input_ids)
        return self.layer(states, position_embeddings=self.rotary(states, position_ids), attention_mask=None)


def test_a_stage_of_layers_is_refused_and_stocks_would_leak():
    model = llama("sdpa")
    other = IDS.clone()
    other[:, : LENGTHS[0]] = 9
    before, after = (First(model)(ids, PACKED["position_ids"]) for ids in (IDS, other))
    assert error(after[:, LENGTHS[0] :], before[:, LENGTHS[0] :]) > LEAK
    with autopack.enable(model), refused("past-the-entry"):
        First(model)(**PACKED)


def test_torchs_tracer_is_told_why_it_cannot_have_packed_rows():
    model = llama("sdpa", use_cache=False)
    split = {"model.layers.1": pipelining.SplitPoint.BEGINNING}
    with autopack.enable(model), pytest.raises(RuntimeError) as raised:
        pipelining.pipeline(model, mb_args=(), mb_kwargs=PACKED, split_spec=split)
    assert isinstance(raised.value.__cause__, autopack.UnsupportedModel)
    assert "have no values" in str(raised.value.__cause__)
    with autopack.enable(model):  # and nothing stays behind
        assert error(model(**PACKED).logits, alone(model, IDS, LENGTHS)) < FLOAT64
