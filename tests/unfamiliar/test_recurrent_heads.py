"""A recurrent layer of somebody's own over a backbone: no document of a packed row can have what it
has alone.

Where it leaves padding out by itself (`pack_padded_sequence`), padded batches run without theirs in
the backbone."""

import copy
import logging

import torch
from torch import nn
from torch.nn.utils import rnn
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

import autopack
from autopack import tiny
from tests.conftest import FLOAT32, LEAK, LENGTHS, error, positions, spans
from tests.subjects import without_dropout
from tests.support.padded import GRADIENT, batch, mask_of, model_gradient_error, packs_at_once
from tests.support.refusals import refused, refused_by_its_first_call


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
    with refused("not-exact", match="of the class GRU"):
        autopack.enable(model)
    assert not autopack.is_enabled(model)
    expected = torch.cat([model(ids[:, a:b]).logits for a, b in spans(LENGTHS)], 1)
    with packs_at_once(model, verify=False):
        assert error(model(ids, position_ids=positions(LENGTHS)).logits, expected) > LEAK
        # Of its padded batches nothing can be left out either: the layer goes on from padding.
        padded = batch("backbone", mask_of((6, 11, 11)))
        with torch.no_grad():
            found = model(**padded).logits
    real = padded["attention_mask"].bool()
    assert error(found[real], model(**padded).logits[real]) > LEAK


class Careful(Tagger):
    """The same, with a GRU that is shown real tokens only, and a loss."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None):
        states = self.bert(input_ids, attention_mask, position_ids=position_ids).last_hidden_state
        rows, columns = input_ids.shape
        lengths = (
            torch.full((rows,), columns) if attention_mask is None else attention_mask.sum(1).cpu()
        )
        shown = rnn.pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
        states, _ = rnn.pad_packed_sequence(
            self.layer(shown)[0], batch_first=True, total_length=columns
        )
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(states.flatten(0, 1), labels.flatten())
        )
        return TokenClassifierOutput(loss=loss, logits=states)


def careful():
    torch.manual_seed(0)
    config = tiny.config("bert", task="masked-lm")
    stock = without_dropout(Careful(config).train())
    return (
        stock,
        copy.deepcopy(stock),
        batch("token classification", mask_of((5, 12, 9)), classes=16),
    )


def test_one_that_is_shown_real_tokens_only_gets_them_of_batches_without_padding(caplog):
    stock, model, padded = careful()
    with caplog.at_level(logging.WARNING, "autopack"), autopack.enable(model) as handle:
        for which in (model, stock):
            which(**padded).loss.backward()
        assert model_gradient_error(model, stock) < GRADIENT
        real = padded["attention_mask"].bool()
        with torch.no_grad():
            assert error(model(**padded).logits[real], stock(**padded).logits[real]) < FLOAT32
        assert handle.tally.batches == 2
        row = {"input_ids": padded["input_ids"][:1], "position_ids": positions((5, 7))}
        with refused("not-exact"):
            model(**row)
    assert "refuses its packed rows: its own forward mixes documents" in caplog.text


def test_padding_on_the_left_which_it_would_take_for_tokens_stays():
    stock, model, padded = careful()
    flipped = {name: value.flip(1) for name, value in padded.items()}
    with autopack.enable(model) as handle:
        found, expected = model(**flipped).logits, stock(**flipped).logits
        assert error(found, expected) < FLOAT32
        assert not handle.tally.batches


class Mixes(nn.Linear):
    def forward(self, states):
        return super().forward(states + 0.3 * states.cumsum(1))


def test_over_a_backbone_that_mixes_tokens_it_is_refused():
    """The control: what is in the backbone is in padded batches without their padding, too."""
    _, model, _ = careful()
    held = model.bert.encoder.layer[0].intermediate.dense
    model.bert.encoder.layer[0].intermediate.dense = Mixes(held.in_features, held.out_features)
    refused_by_its_first_call(model)
