"""Layers of the BERT kind that take some tokens at a time (`chunk_size_feed_forward`): a row has to be a multiple."""

from __future__ import annotations

import pytest
import torch
from transformers import BertForMaskedLM
from transformers.models.bert.modeling_bert import BertIntermediate

import autopack
from autopack import tiny
from tests.conftest import FLOAT64, LEAK, error, gradient_error, gradients, positions, weights_like
from tests.support.refusals import refused, refused_by_its_first_call

LENGTHS = (3, 9, 4)
"""None is a multiple of both sizes; the row is one of 2 and of 4."""


def _twins(kind, size, task="masked-lm"):
    build = {"task": task, "attn_implementation": "eager", "dtype": torch.float64}
    model, stock = tiny.build(kind, chunk_size_feed_forward=size, **build), tiny.build(kind, **build)
    return model.eval(), stock.eval()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["bert", "electra", "roformer"])
def test_packed_rows_are_those_of_the_documents_alone_unchunked(kind, size):
    model, stock = _twins(kind, size)
    ids = tiny.tokens(model.config, 1, sum(LENGTHS))
    documents = ids.split(LENGTHS, dim=1)
    expected = torch.cat([stock(input_ids=each).logits for each in documents], 1)
    (expected * weights_like(expected)).sum().backward()
    row = {"input_ids": ids, "position_ids": positions(LENGTHS)}
    assert error(stock(input_ids=ids).logits, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "by a twin" in str(handle.verified)
        found = model(**row).logits
        assert error(found, expected) < FLOAT64
        (found * weights_like(found)).sum().backward()
        used = [(p, q) for p, q in zip(model.parameters(), stock.parameters(), strict=True) if q.grad is not None]
        assert (
            gradient_error(
                [p.grad for p, q in used if q.grad.abs().max() > 1e-9],
                [q.grad for _, q in used if q.grad.abs().max() > 1e-9],
            )
            < FLOAT64
        )
        with refused("does-not-fit"):
            model(input_ids=ids[:, :-1], position_ids=positions(LENGTHS)[:, :-1])


@pytest.mark.parametrize(("length", "kept"), [(8, False), (9, True)])
def test_padded_batches_keep_their_padding_where_stock_alone_can_chunk_them(length, kept):
    model, stock = _twins("bert", 4)
    ids = tiny.tokens(model.config, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, length:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with autopack.enable(model) as handle:
        found, expected = model(**call), stock(**call)
        assert error(found.logits[mask.bool()], expected.logits[mask.bool()]) < FLOAT64
        assert float(found.loss.detach()) == pytest.approx(float(expected.loss.detach()), abs=1e-6)
        found.loss.backward()
        assert ("tokens at a time" in handle.explain(**call).reason) == kept
    expected.loss.backward()
    ours, theirs = (torch.cat([gradient.flatten() for gradient in gradients(which)]) for which in (model, stock))
    assert error(ours, theirs) < 1e-5  # transformers has the loss in float32


def test_checks_of_calls_go_on_where_stock_cannot_run_a_document_alone():
    model, _ = _twins("bert", 4)
    model.train()
    ids = tiny.tokens(model.config, 1, sum(LENGTHS))
    with autopack.enable(model, check_every=1) as handle:
        for _ in range(3):
            model(input_ids=ids, position_ids=positions(LENGTHS), labels=ids).loss.backward()
        assert (handle.checked.checks, handle.checked.leaks, handle.checked.worst) == (3, 0, 0.0)  # by replacement


class Mixing(BertIntermediate):
    """Every token gets something of those that the layer takes at the same time."""

    def forward(self, hidden_states):
        return super().forward(hidden_states + hidden_states.mean(1, keepdim=True))


class Own(BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.bert.encoder.layer:
            layer.intermediate = Mixing(config)
        self.post_init()


def test_what_mixes_the_tokens_of_a_chunk_is_refused():
    """Its twin would take one token at a time, beside which nothing is mixed."""
    config = tiny.config("bert", task="masked-lm", chunk_size_feed_forward=4)
    refused_by_its_first_call(Own(config), lengths=LENGTHS)
    model = Own(config).double().eval()  # the control: without a proof a document changes another one
    ids = tiny.tokens(None, 1, sum(LENGTHS))
    other = ids.clone()
    other[:, LENGTHS[0]] = 99
    with autopack.enable(model, verify=False), torch.no_grad():
        first, second = (model(input_ids=each, position_ids=positions(LENGTHS)).logits for each in (ids, other))
    assert error(first[:, : LENGTHS[0]], second[:, : LENGTHS[0]]) > LEAK
