"""Documents padded to a multiple of columns, and batches that all have one shape."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import autopack
from autopack import PackedBatchSampler, PackingCollator
from tests.conftest import FLOAT64, LEAK, error
from tests.engine import ids
from tests.packing.batches import ABC, Documents
from tests.subjects import build
from tests.support.refusals import refused

LENGTHS = (7, 12, 2, 9, 4, 8)
DOCUMENTS = ids(lengths=LENGTHS)[0].split(LENGTHS)


def test_without_the_mask_padding_inside_documents_is_seen():
    """Negative control: what the refusal of `declare=()` is for."""
    model, stock = build("bert", "masked-lm"), build("bert", "masked-lm")
    batch = PackingCollator.for_model(model, align=8, labels="none")([{"input_ids": DOCUMENTS[0]}] * 2)
    alone = stock(input_ids=DOCUMENTS[0][None]).logits[0]
    autopack.enable(model)
    assert error(model(**batch).logits[0, :7], alone) < FLOAT64
    batch.pop("attention_mask")
    assert error(model(**batch).logits[0, :7], alone) > LEAK


def test_a_class_per_document_is_that_of_its_last_token_and_not_of_padding():
    model, stock = (build("llama", "sequence-classification") for _ in range(2))
    documents = [*DOCUMENTS, DOCUMENTS[0][:1]]
    examples = [{"input_ids": d, "label": i % 2} for i, d in enumerate(documents)]
    batch = PackingCollator.for_model(model, align=8, max_length=24)(examples)
    autopack.enable(model)
    expected = torch.cat([stock(input_ids=d[None]).logits for d in documents])
    assert error(model(**batch).logits, expected) < FLOAT64


@pytest.mark.parametrize("strategy", ["best_fit", "random", "sequential"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_batches_of_all_epochs_have_one_shape(strategy, ranks):
    lengths = np.random.default_rng(1).integers(1, 60, 200).tolist()
    declare = ("attention_mask", "cu_seq_lens")
    collate = PackingCollator(max_length=64, rows=2, max_documents=5, align=4, declare=declare)
    options = {"rows_per_batch": 2, "strategy": strategy, "max_documents": 5, "align": 4, "num_replicas": ranks}
    shapes, tokens = set(), 0
    for rank in range(ranks):
        sampler = PackedBatchSampler(lengths, 64, rank=rank, **options)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(Documents(lengths), batch_sampler=sampler, collate_fn=collate):
                real = batch.pop("attention_mask", torch.ones_like(batch["input_ids"]))  # not where there is no padding
                tokens += int(real.sum())
                shapes.add(json.dumps({name: getattr(value, "shape", value) for name, value in batch.items()}))
    assert len(shapes) == 1
    assert tokens == 2 * sum(lengths)


def test_a_batch_of_more_rows_is_refused_with_the_way_out():
    with refused("does-not-fit", match=r"rows=1: 3 documents of 9 tokens take 2 rows of 8.*PackedBatchSampler"):
        PackingCollator(max_length=8, rows=1, align=2)(ABC)


def test_a_packed_row_is_as_long_as_its_padded_documents():
    rows = autopack.pack([{"input_ids": [5] * n} for n in (7, 9, 3)], 24, align=8)
    collate = PackingCollator(max_length=24, align=8)
    assert sorted(len(row["input_ids"]) for row in rows) == [7, 12]  # one row of 19 if nothing were padded
    assert {collate([row])["input_ids"].shape[1] for row in rows} == {8, 24}
    too_long = {"input_ids": [5] * 19, "seq_lengths": [7, 9, 3]}
    with refused("unusable-data", match=r"19 tokens \(32 with each document padded to a multiple of 8\)"):
        collate([too_long])
    cut = PackingCollator(max_length=24, align=8, overflow="truncate")([too_long])
    assert int(cut["attention_mask"].sum()) == 16
    with refused("unusable-data", match="found 3 documents for rows of at most 2; raise max_documents"):
        PackingCollator(max_length=24, max_documents=2)([too_long])


def test_positions_of_documents_own_end_before_the_next_begins():
    own = [{"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}, {"input_ids": [4, 5], "position_ids": [4, 5]}]
    with refused("unusable-data", match="end at 2, and the next document of the row starts at 4"):
        PackingCollator(align=4)(own)
    own[1]["position_ids"] = [0, 1]
    assert PackingCollator(align=4)(own)["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


def test_a_state_from_before_is_taken_and_one_of_other_padding_is_not():
    one, other = (PackedBatchSampler([3, 4, 5], 16, align=align) for align in (1, 8))
    assert "align" not in one.state_dict()["made_of"]
    with refused("other-data", match="align was 8 and is"):
        one.load_state_dict(other.state_dict())
