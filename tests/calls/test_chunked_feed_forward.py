"""Layers of the BERT kind that take some tokens at a time (`chunk_size_feed_forward`): a row has to
be a multiple."""

import pytest
import torch
from transformers import BertForMaskedLM
from transformers.models.bert.modeling_bert import BertIntermediate

import autopack
from autopack import tiny
from tests.conftest import LEAK, error, positions
from tests.engine import Call, check, ids, leaks
from tests.subjects import build
from tests.support.refusals import refused, refused_by_its_first_call

LENGTHS = (3, 9, 4)
"""None is a multiple of both sizes; the row is one of 2 and of 4."""


def _build(kind, size=0):
    return build(kind, "masked-lm", attn_implementation="eager", chunk_size_feed_forward=size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "lengths", "others"),
    [
        ("bert", LENGTHS, (3, 9, 3)),
        ("electra", LENGTHS, (3, 9, 3)),
        ("roformer", (4, 12, 4), LENGTHS),  # runs documents alone
    ],
)
def test_packed_rows_are_those_of_the_documents_alone_unchunked(kind, lengths, others, size):
    call, model, stock = Call(lengths=lengths, shifts=False), _build(kind, size), _build(kind)
    expected = call.alone(stock)
    assert leaks(call.undeclared(stock), expected)
    with autopack.enable(model) as handle:
        assert "on a tiny copy" in str(handle.verified)
        check(call.packed(model), expected)
        with refused("does-not-fit"):
            Call(lengths=others).packed(model)


@pytest.mark.parametrize(
    ("length", "kept", "when"), [(8, False, "before"), (9, True, "before"), (9, True, "after")]
)
def test_padded_batches_keep_their_padding_where_stock_alone_can_chunk_them(length, kept, when):
    """Stock asks of the columns of a batch that they are a multiple, and the tokens of a batch may
    be none."""
    call, stock, model = (
        Call(lengths=(length, 12), shifts=False),
        _build("bert", 4),
        _build("bert", 4 * (when == "before")),
    )
    with autopack.enable(model, verify=False) as handle:
        for layer in model.bert.encoder.layer:
            layer.chunk_size_feed_forward = 4
        check(call.padded(model), call.padded(stock))
        assert any("tokens at a time" in reason for reason in handle.tally.left) == kept


def test_checks_of_calls_go_on_where_stock_cannot_run_a_document_alone():
    model = _build("bert", 4).train()
    with autopack.enable(model, check_every=1) as handle:
        for _ in range(3):
            Call(lengths=LENGTHS).packed(model)
        # by replacement
        assert (handle.checked.checks, handle.checked.leaks, handle.checked.worst) == (3, 0, 0.0)


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
    # the control: without a proof a document changes another one
    model = Own(config).double().eval()
    rows = [ids(seed, LENGTHS) for seed in range(2)]
    rows[1][:, : LENGTHS[0]] = rows[0][:, : LENGTHS[0]]
    with autopack.enable(model, verify=False), torch.no_grad():
        first, second = (
            model(input_ids=each, position_ids=positions(LENGTHS)).logits for each in rows
        )
    assert error(first[:, : LENGTHS[0]], second[:, : LENGTHS[0]]) > LEAK
