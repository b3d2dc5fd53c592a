"""Types whose documents begin at a later position than 0: positions before it are refused, all ways out are exact.

Errors are relative to the standard deviation of the logits, in float64. A table of positions read from its first row on
moves them by more than `LEAK`.
"""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from autopack.registry import first_position
from tests.conftest import FLOAT64, LEAK, LENGTHS, error, positions, spans, token_ids
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
IDS = token_ids()
NUMBER = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))[None]
IN_FLOAT32 = 1e-5
"""Rotations are computed in float32 whatever the model's dtype; seven digits are left."""
TYPES = [
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "nystromformer", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
]  # fmt: skip


def build(model_type, **config):
    return tiny.build(model_type, task="masked-lm", **config).double()


def alone(model):
    return torch.cat([model(input_ids=IDS[:, a:b]).logits for a, b in spans(LENGTHS)], dim=1)


@pytest.mark.parametrize("model_type", TYPES)
def test_positions_that_restart_at_0_are_refused(model_type):
    model = build(model_type)
    expected, first = alone(model), first_position(model.config)
    assert first > 0
    a, b = spans(LENGTHS)[0]
    other = model(input_ids=IDS[:, a:b], position_ids=torch.arange(b)[None]).logits
    assert error(other, expected[:, a:b]) > LEAK  # a document numbered from 0 is another document
    with autopack.enable(model):
        with refused("first-position", match=f"begin at 0, but .* first token of a document {first}.*seq_idx"):
            model(input_ids=IDS, position_ids=positions(LENGTHS))
        for said in (
            {"position_ids": positions(LENGTHS, start=first)},
            {"seq_idx": NUMBER},
            {"attention_mask": NUMBER},
        ):
            assert error(model(input_ids=IDS, **said).logits, expected) <= FLOAT64


@pytest.mark.parametrize("model_type", ["roberta", "mpnet", "xlm-roberta"])
def test_the_collator_of_a_model_begins_where_its_documents_do(model_type):
    model = build(model_type)
    expected = alone(model)
    documents = [{"input_ids": IDS[0, a:b], "labels": IDS[0, a:b]} for a, b in spans(LENGTHS)]
    plain = autopack.PackingCollator(labels="unshifted")(documents)
    fitting = autopack.PackingCollator.for_model(model)(documents)
    with autopack.enable(model):
        with refused("first-position"):
            model(**plain)
        assert error(model(**fitting).logits, expected) <= FLOAT64


def test_padding_and_padded_batches_are_not_looked_at():
    """Positions of padding are nobody's; a batch of one document per row is what stock makes of it."""
    model = build("roberta")
    expected = alone(model)
    row = torch.cat([positions(LENGTHS, start=2), torch.zeros(1, 3, dtype=torch.long)], dim=1)
    batch = {
        "input_ids": IDS[:, :12].reshape(2, 6),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
        "position_ids": torch.arange(6)[None],
    }
    stock = model(**batch).logits[batch["attention_mask"].bool()]
    with autopack.enable(model):
        ids = torch.cat([IDS, IDS[:, :3]], dim=1)
        mask = (torch.arange(ids.shape[1]) < IDS.shape[1]).long()[None]
        found = model(input_ids=ids, position_ids=row, attention_mask=mask).logits
        assert error(found[:, : IDS.shape[1]], expected) <= FLOAT64
        assert error(model(**batch).logits[batch["attention_mask"].bool()], stock) <= FLOAT64


@pytest.mark.parametrize(("task", "model_type"), [("masked-lm", "esm"), ("image-text-to-text", "paligemma")])
def test_rotations_know_only_differences(task, model_type):
    config = {"position_embedding_type": "rotary"} if model_type == "esm" else {}
    model = tiny.build(model_type, task=task, **config).double()
    expected = alone(model)
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=positions(LENGTHS)).logits
    assert error(found, expected) <= IN_FLOAT32


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("place", [0, 2, -1], ids=["first", "inside", "last"])
def test_a_padding_token_inside_a_document_is_numbered_as_alone(model_type, place):
    """Most count no padding token, wherever it stands: it gets the position of its number, and those after it go on."""
    model = build(model_type)
    ids = IDS.clone()
    for first, end in spans(LENGTHS)[1:]:
        ids[0, range(first, end)[place]] = model.config.pad_token_id
    expected = torch.cat([model(input_ids=ids[:, a:b]).logits for a, b in spans(LENGTHS)], dim=1)
    as_ordinary = positions(LENGTHS, start=first_position(model.config))
    with autopack.enable(model):
        assert error(model(input_ids=ids, seq_idx=NUMBER).logits, expected) <= FLOAT64
        counted = model_type not in ("nystromformer", "yoso")
        if counted:  # the positions of ordinary tokens make other documents of these
            other = model(input_ids=ids, position_ids=as_ordinary).logits
            assert error(other, expected) > LEAK
        longest = max(LENGTHS)
        batch, mask = ids.new_zeros(len(LENGTHS), longest), ids.new_zeros(len(LENGTHS), longest)
        for row, (a, b) in enumerate(spans(LENGTHS)):
            batch[row, : b - a], mask[row, : b - a] = ids[0, a:b], 1
        found = model(input_ids=batch, attention_mask=mask).logits
    stock = model(input_ids=batch, attention_mask=mask).logits
    assert error(found[mask.bool()], stock[mask.bool()]) <= FLOAT64
