"""Types whose documents begin at a later position than 0: positions before it are refused, all ways
out are exact.

A table of positions read from its first row on moves the logits by more than `LEAK`.
"""

from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from autopack.registry import first_position
from tests.conftest import FLOAT64, LEAK, LENGTHS, alone, error, positions, spans, token_ids
from tests.engine import Call, must_be_exact, numbered, padded_batch
from tests.support.refusals import refused

IDS, NUMBER = token_ids(), numbered(LENGTHS)
IN_FLOAT32 = 1e-5
"""Rotations are computed in float32 whatever the model's dtype; seven digits are left."""
TYPES = [
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "nystromformer", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
]  # fmt: skip


def build(model_type, task="masked-lm", **config):
    return tiny.build(model_type, task=task, **config).double()


@pytest.mark.parametrize("form", ["position_ids", "seq_idx", "segments"])
@pytest.mark.parametrize("model_type", TYPES)
def test_documents_begin_where_those_of_the_type_do(model_type, form):
    labels = None if model_type == "longformer" else "labels"  # stock's gradients are no numbers
    must_be_exact(partial(build, model_type), Call(labels=labels, shifts=False, form=form).both)


@pytest.mark.parametrize("model_type", TYPES)
def test_positions_that_restart_at_0_are_refused(model_type):
    model = build(model_type)
    assert first_position(model.config) > 0
    document = IDS[:, : LENGTHS[0]]
    expected = model(input_ids=document).logits
    other = model(input_ids=document, position_ids=positions(LENGTHS[:1])).logits
    assert error(other, expected) > LEAK  # a document numbered from 0 is another document
    with autopack.enable(model), refused("first-position"):
        model(input_ids=IDS, position_ids=positions(LENGTHS))


def test_positions_of_padded_batches_are_what_stock_makes_of_them():
    """They may begin at 0."""
    where = torch.arange(max(LENGTHS))[None]
    call = Call(given={"position_ids": where}, shifts=False, lengths=LENGTHS)
    must_be_exact(partial(build, "roberta"), call.batch)


@pytest.mark.parametrize(
    ("model_type", "task", "config"),
    [
        ("esm", "masked-lm", {"position_embedding_type": "rotary"}),
        ("paligemma", "image-text-to-text", {}),
    ],
)
def test_rotations_know_only_differences(model_type, task, config):
    model = build(model_type, task, **config)
    expected = torch.cat([model(input_ids=part).logits for part in IDS.split(LENGTHS, 1)], 1)
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=positions(LENGTHS))
    assert error(found.logits, expected) <= IN_FLOAT32


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("place", [0, 2, -1], ids=["first", "inside", "last"])
def test_a_padding_token_inside_a_document_is_numbered_as_alone(model_type, place):
    """Most count no padding token, wherever it stands: it gets the position of its number, and
    those after it go on."""
    model, ids = build(model_type), IDS.clone()
    for first, end in spans(LENGTHS)[1:]:
        ids[0, range(first, end)[place]] = model.config.pad_token_id
    expected = alone(model, ids, LENGTHS)
    batch = padded_batch(ids[0].split(LENGTHS))
    real = batch["attention_mask"].bool()
    stock = model(**batch).logits[real]
    with autopack.enable(model):
        assert error(model(input_ids=ids, seq_idx=NUMBER).logits, expected) <= FLOAT64
        assert error(model(**batch).logits[real], stock) <= FLOAT64
        if model_type not in (
            "nystromformer",
            "yoso",
        ):  # the positions of ordinary tokens make other documents of these
            as_ordinary = positions(LENGTHS, start=first_position(model.config))
            assert error(model(input_ids=ids, position_ids=as_ordinary).logits, expected) > LEAK
