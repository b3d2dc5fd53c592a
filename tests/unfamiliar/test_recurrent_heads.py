"""A recurrent layer of somebody's own over a backbone: no document of a packed row can have what it has alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

import autopack
from autopack import tiny
from tests.conftest import LEAK, LENGTHS, error, positions, spans


class Tagger(BertPreTrainedModel):
    """Tags of tokens by a GRU in both directions, which reads padding as stock gives it."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.layer = nn.GRU(config.hidden_size, 8, batch_first=True, bidirectional=True)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        states = self.bert(input_ids, attention_mask, position_ids=position_ids).last_hidden_state
        return TokenClassifierOutput(logits=self.layer(states)[0])


def test_such_a_model_is_refused_at_once_by_the_name_of_its_layer_and_left_as_it_was():
    torch.manual_seed(0)
    model = Tagger(tiny.config("bert", task="masked-lm")).eval()
    ids = tiny.tokens(model.config, 1, sum(LENGTHS))
    with pytest.raises(autopack.UnsupportedModel, match="it begins in GRU"):
        autopack.enable(model)
    assert not autopack.is_enabled(model)
    expected = torch.cat([model(ids[:, a:b]).logits for a, b in spans(LENGTHS)], 1)
    with autopack.enable(model, verify="never", unpad="always"):
        assert error(model(ids, position_ids=positions(LENGTHS)).logits, expected) > LEAK
        # Of its padded batches nothing can be left out either: the layer goes on from padding.
        batch = {"input_ids": ids.reshape(3, -1), "attention_mask": torch.ones(3, sum(LENGTHS) // 3).long()}
        batch["attention_mask"][0, 6:] = 0
        with torch.no_grad():
            found = model(**batch).logits
    real = batch["attention_mask"].bool()
    assert error(found[real], model(**batch).logits[real]) > LEAK
