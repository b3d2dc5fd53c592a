"""Heads with one result per row, on packed rows: each document gets the result, loss and gradients
it gets alone."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autopack
from autopack import tiny
from tests.conftest import FLOAT32, FLOAT64, LENGTHS, error, positions, token_ids
from tests.engine import Call, must_be_exact
from tests.heads.models import (
    CLASSES,
    ENDS,
    IDS,
    TASKS,
    agrees,
    each_alone,
    mamba_classifier,
    packed,
    results,
    serves,
    with_head,
)
from tests.support import padded

SERVED = [
    *(
        (name, "sequence-classification")
        for name in ("llama", "bert", "gpt2", "qwen2", "qwen3", "modernbert")
    ),
    *(
        (name, "sequence-classification")
        for name in ("roberta", "mamba", "zamba2", "bloom", "deberta-v2")
    ),
    *((name, "sequence-classification") for name in ("albert", "big_bird", "convbert")),
    *((name, "question-answering") for name in ("bert", "llama", "modernbert", "gpt2")),
    ("bert", "next-sentence-prediction"),
    # These run documents alone: one cannot be told of padding, one has no smaller part to serve.
    *(
        (name, "sequence-classification")
        for name in ("fnet", "xlnet", "canine", "funnel", "perceiver")
    ),
    *((name, "question-answering") for name in ("fnet", "xlnet", "funnel")),
]
SINGLE = {"mamba", "xlnet", "zamba2", "canine", "funnel", "perceiver"}
"""Some of their code is float32 whatever the dtype of the model."""


@pytest.mark.parametrize(("model_type", "task"), SERVED)
def test_each_document_of_a_packed_row_gets_what_it_gets_alone(model_type, task):
    single = model_type in SINGLE
    stock = (
        mamba_classifier()
        if model_type == "mamba"
        else with_head(model_type, task, *[torch.float32] * single)
    )
    serves(stock, TASKS[task], FLOAT32 if single else FLOAT64, verify=False)


@torch.no_grad()
@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
def test_reformer_numbers_documents_itself(task):
    """In eval mode it pads documents to chunks, and raises where it is handed positions; alone they
    come without."""
    stock = with_head("reformer", task, local_attn_chunk_length=9)
    with pytest.raises(RuntimeError, match="expand"):
        stock(input_ids=IDS[:, :7], position_ids=torch.arange(7)[None])
    serves(stock, TASKS[task], verify=False)


PROBLEMS = {
    "regression": torch.randn(
        4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ),
    "multi_label_classification": torch.tensor(
        [[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]
    ).double(),
    "single_label_classification": torch.tensor([2, 0, -100, 1]),
    None: torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64),  # one number for each document
}


@pytest.mark.parametrize("model_type", ["llama", "fnet"])
@pytest.mark.parametrize("problem_type", PROBLEMS)
def test_problem_types(model_type, problem_type):
    labels, classes = PROBLEMS[problem_type], 3 if problem_type else 1
    stock = with_head(model_type, problem_type=problem_type, num_labels=classes)
    model = copy.deepcopy(stock)
    counted = [i for i in range(4) if labels.is_floating_point() or labels[i] != -100]
    with autopack.enable(model, verify=False):
        output = packed(model, labels=labels)
    documents = IDS[0].split(LENGTHS)
    _, loss = each_alone(stock, [documents[i] for i in counted], {"labels": labels[counted]})
    assert abs(output.loss - loss) < FLOAT64
    assert problem_type in (None, model.config.problem_type)


def test_two_rows_and_padding_between_documents():
    stock = with_head("llama")
    model, labels = copy.deepcopy(stock), {"labels": torch.tensor([0, 1, 2, 0, 1])}
    ids, lengths = token_ids(2, 14), ((5, 3, 4), (6, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:7] = 0
    rows = positions((5, 2, 3, 4), (6, 8))
    documents = [*ids[0, [*range(5), *range(7, 14)]].split(lengths[0]), *ids[1].split(lengths[1])]
    with autopack.enable(model):
        output = model(input_ids=ids, attention_mask=mask, position_ids=rows, **labels)
        agrees(model, stock, output, documents, labels)


class OfTokens(Call):
    """A label for each token."""

    def labelled(self, tokens):
        return {"labels": tokens % 3}


@pytest.mark.parametrize("model_type", ["llama", "bert", "roberta"])
def test_token_classification_has_labels_per_token(model_type):
    must_be_exact(
        partial(with_head, model_type, "token-classification"), OfTokens(shifts=False).row
    )


def test_spans_come_back_one_document_per_row_and_padding_cannot_be_chosen():
    model = with_head("bert", "question-answering")
    with autopack.enable(model):
        output = packed(model)
    assert output.start_logits.shape == output.end_logits.shape == (4, 12)
    for starts, length in zip(output.start_logits, LENGTHS, strict=True):
        assert (starts[length:] == torch.finfo(starts.dtype).min).all()
        assert starts.argmax() < length


def test_an_answer_at_the_end_of_its_document_is_left_out_of_the_loss():
    stock = with_head("bert", "question-answering")
    model, documents = copy.deepcopy(stock), IDS[0].split(LENGTHS)
    outside = torch.tensor([7, 3, 0, 8])
    with autopack.enable(model):
        loss = packed(model, start_positions=outside, end_positions=ENDS).loss
    starts, ends = zip(
        *(results(stock(input_ids=document[None]))[0].T for document in documents), strict=True
    )
    cross_entropy = nn.functional.cross_entropy
    of_starts = [
        cross_entropy(logits, at) for logits, at in zip(starts[1:], outside[1:], strict=True)
    ]
    of_ends = [cross_entropy(logits, at) for logits, at in zip(ends, ENDS, strict=True)]
    assert abs(loss - (torch.stack(of_starts).mean() + torch.stack(of_ends).mean()) / 2) < FLOAT64


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_documents_that_hold_and_end_with_the_padding_token(model_type):
    stock = with_head(model_type)
    pad, ids = stock.config.pad_token_id, IDS.clone()
    ids[:, [0, 3, 17, 18]] = pad  # first, inside, the last two of a document
    ids[:, 19:24] = pad  # a whole document
    serves(stock, TASKS["sequence-classification"], ids=ids)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_what_belongs_to_tokens_goes_along(model_type):
    """Embeddings in the place of tokens, types of tokens, and positions of a document that goes
    on."""
    stock = with_head(model_type)
    model, where = copy.deepcopy(stock), positions(LENGTHS)
    given = {
        "inputs_embeds": stock.get_input_embeddings()(IDS).detach(),
        "position_ids": where,
    }
    if model_type == "bert":
        where[:, :7] += 5
        given["token_type_ids"] = (torch.arange(33) % 3 == 0).long()[None]
    parts = zip(*(each.split(LENGTHS, 1) for each in given.values()), strict=True)
    expected = [stock(**dict(zip(given, part, strict=True))).logits for part in parts]
    with autopack.enable(model):
        assert error(model(**given).logits, torch.cat(expected)) < FLOAT64


@pytest.mark.parametrize("model_type", ["llama", "bert", "fnet"])
def test_states_weights_and_tuples_are_by_documents(model_type):
    stock = with_head(model_type)
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    wanted = {"output_hidden_states": True, "output_attentions": model_type == "llama"}
    with autopack.enable(model, verify=False):
        found = packed(model, **wanted)
        as_tuple = packed(model, return_dict=False, **labels)
        output = packed(model, **labels)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], output.loss)
    assert torch.equal(as_tuple[1], output.logits)
    for i, document in enumerate(IDS[0].split(LENGTHS)):
        own, real = stock(input_ids=document[None], **wanted), slice(len(document))
        for state, one in zip(found.hidden_states, own.hidden_states, strict=True):
            assert state.shape[:2] == (4, 12)
            assert (state[i, real] - one[0]).abs().max() < FLOAT64
            assert not state[i, len(document) :].any()
        for weights, one in zip(found.attentions or (), own.attentions or (), strict=True):
            assert weights.shape == (4, 4, 12, 12)
            assert (weights[i][:, real, real] - one[0]).abs().max() < FLOAT64
            assert abs(weights[i].sum() - one.sum()) < FLOAT64


def test_states_of_as_many_documents_as_tokens_but_one_are_no_leak():
    """A check must not take three documents for four tokens that lack a column, as shifted labels
    do."""
    model, lengths = with_head("bert"), (2, 1, 1)
    row = {
        "input_ids": IDS[:, : sum(lengths)],
        "position_ids": positions(lengths),
        "output_hidden_states": True,
    }
    with autopack.enable(model, check_every=1) as handle, torch.no_grad():
        assert model(**row).hidden_states[1].shape[:2] == (3, 2)
        assert handle.checked.checks == 1


def test_it_is_the_same_whatever_becomes_of_padded_batches():
    handle = serves(with_head("bert"), {"labels": CLASSES}, unpad=False)
    assert "no padded batch yet" in str(handle.tally)


@pytest.mark.parametrize("task", ["masked LM", "token classification"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_a_head_by_tokens_computes_no_padding(model_type, task):
    """It does as many operations for a padded batch as for a packed row of the same documents."""
    model, mask = padded.build(model_type, task), padded.mask_of(padded.PADDED)
    batch, operations = padded.batch(task, mask), []
    row = {
        name: value[mask.bool()][None] for name, value in batch.items() if name != "attention_mask"
    }
    with autopack.enable(model, check_every=0):
        for call in (batch, row | {"position_ids": positions(padded.PADDED)}):
            with FlopCounterMode(display=False) as counter:
                model(**call).loss.backward()
            operations.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert operations[0] == operations[1] < counter.get_total_flops()


# What a head makes of the tokens of a document: poolers, summaries and means.

POOLED = [
    # reads padding: documents run alone
    *(("xlm", {"summary_type": kind}) for kind in ("last", "mean", "first")),
    # leaves padding out
    *(("modernbert", {"classifier_pooling": kind}) for kind in ("mean", "cls")),
]


@pytest.mark.parametrize(("model_type", "options"), POOLED)
def test_what_a_head_makes_of_all_tokens_is_of_those_of_a_document(model_type, options):
    serves(with_head(model_type, **options), {"labels": CLASSES}, verify=False)


def test_pretraining_has_labels_per_token_and_per_document():
    stock = transformers.BertForPreTraining(tiny.config("bert", task="masked-lm")).double().eval()
    model, next_sentence = copy.deepcopy(stock), torch.tensor([0, 1, 1, 0])
    with autopack.enable(model):
        output = packed(model, labels=IDS, next_sentence_label=next_sentence)
    parts = [stock(input_ids=part) for part in IDS.split(LENGTHS, 1)]
    logits = torch.cat([part.prediction_logits[0] for part in parts])
    relations = torch.cat([part.seq_relationship_logits for part in parts])
    assert error(output.prediction_logits[0], logits) < FLOAT64
    assert error(output.seq_relationship_logits, relations) < FLOAT64
    cross_entropy = nn.functional.cross_entropy
    assert (
        abs(output.loss - cross_entropy(logits, IDS[0]) - cross_entropy(relations, next_sentence))
        < FLOAT64
    )
