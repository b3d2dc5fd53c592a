"""Encoders whose documents need more than attention of their own: windows, cells, neighbours,
boxes, quantisation."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForPreTraining

import autopack
from autopack import tiny
from autopack.registry import first_position
from autopack.tiny.models import randomize
from tests.conftest import FLOAT32, LEAK, error, positions, spans
from tests.engine import check, leaks, weighted
from tests.support.refusals import refused

ROWS = ((5, 1, 9, 5), (2, 14, 4))
COLUMNS = 20


def packed_positions(model, rows=ROWS):
    return positions(*rows, start=first_position(model.config))


def alone_by_fields(model, inputs, rows=ROWS, field="logits"):
    """What every document gets alone, of arguments that all have something for each token."""
    found = []
    for row, lengths in enumerate(rows):
        calls = (
            {name: value[row : row + 1, a:b] for name, value in inputs.items()}
            for a, b in spans(lengths)
        )
        found.append(torch.cat([model(**call)[field] for call in calls], dim=1))
    return torch.cat(found)


def serves(model, inputs, rows=ROWS, field="logits", others=()):
    """Want what documents get alone of packed rows of an enabled model."""
    with torch.no_grad(), contextlib.ExitStack() as enabled:
        expected = alone_by_fields(model, inputs, rows, field)
        for each in (model, *others):
            enabled.enter_context(autopack.enable(each))
        assert (
            error(model(**inputs, position_ids=packed_positions(model, rows))[field], expected)
            < FLOAT32
        )


def integers(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def table(rows, columns):
    """Token types of TAPAS: (rows, columns, 7), with cells of a few tokens each."""
    kinds = torch.stack([integers(size, rows, columns) for size in (3, 4, 3, 2, 5, 5, 5)], dim=-1)
    return kinds.sort(dim=1).values


OF_TOKENS = {
    "layoutlm": lambda rows, columns: {
        "bbox": torch.cat(
            [integers(50, rows, columns, 2), 50 + integers(50, rows, columns, 2)], dim=-1
        )
    },
    "longformer": lambda rows, columns: {
        "global_attention_mask": (integers(4, rows, columns) == 0).long()
    },
    "mobilebert": lambda rows, columns: {"token_type_ids": integers(2, rows, columns)},
    "tapas": lambda rows, columns: {"token_type_ids": table(rows, columns)},
}


@pytest.mark.parametrize("model_type", OF_TOKENS)
def test_what_a_call_says_of_single_tokens(model_type):
    """Boxes, cells and global attention go with their documents: logits, gradients, and a negative
    control."""
    model = tiny.build(model_type, task="masked-lm")
    inputs = {
        "input_ids": tiny.tokens(model.config, 2, COLUMNS),
        **OF_TOKENS[model_type](2, COLUMNS),
    }

    expected = weighted(model, alone_by_fields(model, inputs))
    call = {**inputs, "position_ids": packed_positions(model)}
    assert leaks(weighted(model, model(**call).logits), expected)
    with autopack.enable(model):
        check(weighted(model, model(**call).logits), expected)


def test_positions_of_a_table_are_those_of_its_cells_or_as_given():
    """TAPAS alone numbers tokens by cells; positions that do not count from 0 are taken, in the
    same batch too."""
    model = tiny.build("tapas", task="masked-lm")
    ids, kinds = tiny.tokens(model.config, 1, 12), table(1, 12)
    # of one length, so they share a batch
    where = torch.cat([torch.arange(6), torch.arange(3, 9)])[None]
    first = model(input_ids=ids[:, :6], token_type_ids=kinds[:, :6]).logits
    second = model(
        input_ids=ids[:, 6:], token_type_ids=kinds[:, 6:], position_ids=where[:, 6:]
    ).logits
    counted = model(
        input_ids=ids[:, :6], token_type_ids=kinds[:, :6], position_ids=where[:, :6]
    ).logits
    assert error(first, counted) > LEAK  # what the cells say is not what columns say
    numbers = torch.tensor([[0] * 6 + [1] * 6])
    with autopack.enable(model):
        found = model(
            input_ids=ids, token_type_ids=kinds, position_ids=where, seq_idx=numbers
        ).logits
    assert error(found, torch.cat([first, second], dim=1)) < FLOAT32


@settings(max_examples=10)
@given(st.lists(st.integers(1, 11), min_size=2, max_size=5), st.sampled_from([4, 6]), st.booleans())
def test_windows_of_documents_of_any_length(lengths, window, global_tokens):
    model = tiny.build("longformer", task="masked-lm", attention_window=[window, 2 * window])
    columns = sum(lengths)
    inputs = {"input_ids": tiny.tokens(model.config, 1, columns)}
    if global_tokens:
        inputs["global_attention_mask"] = (integers(5, 1, columns) == 0).long()
    serves(model, inputs, [lengths])


def test_neighbours_of_embeddings_that_the_caller_made():
    model = tiny.build("mobilebert", task="masked-lm")
    inputs = {"inputs_embeds": model.get_input_embeddings()(tiny.tokens(model.config, 2, COLUMNS))}
    serves(model, inputs)


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2", "electra", "luke", "mobilebert", "mpnet",
                         "longformer", "tapas", "roberta", "albert"])  # fmt: skip
@pytest.mark.parametrize("kind", [AutoModel, AutoModelForPreTraining])
def test_backbones_and_pretraining_heads_are_exact_or_refused(kind, model_type):
    config = tiny.config(model_type, task="masked-lm")
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager").eval()
    randomize(model, 0)
    inputs = {"input_ids": tiny.tokens(model.config, 2, COLUMNS)}
    name = "last_hidden_state" if kind is AutoModel else "logits"
    name = "prediction_logits" if "prediction_logits" in model(**inputs) else name
    serves(model, inputs, field=name)


@pytest.mark.parametrize(("model_type", "options", "reason"), [
    ("ibert", {"quant_mode": True}, "QuantAct modules quantise all tokens of a batch by one range"),
    ("nystromformer", {"num_landmarks": 8}, (
                                                "segments of a row of exactly "
                                                "segment_means_seq_len = 64 columns"
                                            )),
    ("yoso", {"use_expectation": False}, "draws new random hashes at every call"),
])  # fmt: skip
def test_what_has_no_exact_way_is_refused_with_module_and_reason(model_type, options, reason):
    model = tiny.build(model_type, task="masked-lm", **options)
    before = dict(vars(model))
    with refused("cannot-be-packed", match=reason):
        autopack.enable(model, verify=False)
    assert vars(model) == before


def test_entities_beside_the_row_are_refused_and_tokens_alone_are_not():
    model = tiny.build("luke", task="masked-lm")
    inputs = {
        "input_ids": tiny.tokens(model.config, 2, COLUMNS),
        "position_ids": packed_positions(model),
    }
    spans_of = torch.full((2, 1, 4), -1)
    spans_of[..., 0] = 3
    with autopack.enable(model):
        model(**inputs)
        with refused("argument-of-no-document"):
            model(
                **inputs,
                entity_ids=torch.ones(2, 1, dtype=torch.long),
                entity_position_ids=spans_of,
            )


@pytest.mark.parametrize("model_type", ["longformer", "nystromformer", "rembert"])
def test_masks_of_models_with_own_attention_do_not_depend_on_who_else_is_enabled(model_type):
    model = tiny.build(model_type, task="masked-lm")
    inputs = {"input_ids": tiny.tokens(model.config, 2, COLUMNS)}
    serves(model, inputs, others=[tiny.build("bert", task="masked-lm")])


def test_runs_of_padding_are_no_documents_that_a_model_has_to_run():
    """Funnel runs no document of fewer than five tokens, and two columns of padding are none."""
    model = tiny.build("funnel", task="masked-lm")
    ids, lengths = tiny.tokens(model.config, 1, 18), (7, 9)
    with pytest.raises(RuntimeError):
        model(input_ids=ids[:, :2])
    with torch.no_grad():
        expected = alone_by_fields(model, {"input_ids": ids}, rows=(lengths,))
        with autopack.enable(model):
            segments = torch.tensor([[1] * 7 + [2] * 9 + [0] * 2])
            found = model(input_ids=ids, attention_mask=segments).logits
    assert error(found[:, :16], expected) < FLOAT32
