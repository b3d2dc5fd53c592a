"""Rows cut into the parts that ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from tests.support.refusals import refused

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)


def rows_of(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows as the collator makes them: padded to the longest, with a mask where there is padding."""
    documents = [{"input_ids": torch.arange(1, n + 1) + 10 * i} for row in lengths for i, n in enumerate(row)]
    columns = max(map(sum, lengths))
    rows, rest = [], iter(documents)
    for row in lengths:
        rows.append(autopack.PackingCollator(max_length=columns, rows=1)([next(rest) for _ in row]))
    return {name: torch.cat([_of(row, name) for row in rows]) for name in (*rows[0], "attention_mask")}


def _of(row: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return row.get(name, torch.ones_like(row["input_ids"]))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_parts_are_the_rows(lengths: list[list[int]], ranks: int):
    batch = rows_of(lengths)
    parts = [autopack.packing.shard_rows(batch, rank, ranks) for rank in range(ranks)]
    columns = batch["input_ids"].shape[1]
    assert len({part["input_ids"].shape for part in parts}) == 1
    whole = {
        name: torch.cat([part[name] for part in parts], dim=1)[:, :columns]
        for name in parts[0]
        if name != "num_items_in_batch"
    }
    assert torch.equal(whole["input_ids"], batch["input_ids"])
    assert torch.equal(whole["position_ids"], batch["position_ids"])
    if "attention_mask" in whole:
        assert torch.equal(whole["attention_mask"], batch["attention_mask"])
    # Each token is compared with the next one of its document, and nothing else is.
    shifted, labels = whole["shift_labels"], batch["labels"]
    assert torch.equal(shifted[:, :-1], labels[:, 1:])
    assert (shifted[:, -1] == -100).all()
    assert all(part["num_items_in_batch"] == int((labels != -100).sum()) for part in parts)
    assert all(value.is_contiguous() for part in parts for value in part.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("form", ["seq_idx", "segments", "cu_seq_lens"])
def test_every_declaration_becomes_positions(form: str):
    ids = torch.arange(1, 11)[None]
    forms: dict[str, dict[str, Any]] = {
        "seq_idx": {"seq_idx": torch.tensor([[0] * 3 + [1] * 7], dtype=torch.int32)},
        "segments": {"attention_mask": torch.tensor([[1] * 3 + [2] * 7])},
        "cu_seq_lens": {"cu_seq_lens_q": torch.tensor([0, 3, 10], dtype=torch.int32)},
    }
    parts = [
        autopack.packing.shard_rows({"input_ids": ids, "labels": ids, **forms[form]}, rank, 4) for rank in range(4)
    ]
    positions = torch.cat([part["position_ids"] for part in parts], dim=1)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1]]
    assert torch.cat([part["shift_labels"] for part in parts], dim=1)[0, 2] == -100
    assert torch.cat([part["attention_mask"] for part in parts], dim=1)[0].tolist() == [1] * 10 + [0] * 2
    if form == "seq_idx":
        numbers = torch.cat([part["seq_idx"] for part in parts], dim=1)
        assert numbers[0].tolist() == [0] * 3 + [1] * 7 + [2] * 2


def test_the_first_token_after_padding_is_predicted_by_nothing():
    """As in every padded batch of an enabled model; positions are those of the columns, as stock counts them."""
    ids, mask = torch.arange(1, 9)[None], torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    parts = [
        autopack.packing.shard_rows({"input_ids": ids, "attention_mask": mask, "labels": labels}, rank, 2)
        for rank in range(2)
    ]
    whole = {name: torch.cat([part[name] for part in parts], dim=1)[0].tolist() for name in ("shift_labels",)}
    assert whole["shift_labels"] == [-100] * 3 + [5, 6, 7, 8, -100]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [part["attention_mask"].tolist() for part in parts] == [[[0, 0, 0, 1]], [[1, 1, 1, 1]]]


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_the_number_of_items_of_a_step_stays_that_of_the_caller(items: Any):
    ids = torch.arange(1, 9)[None]
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": items}
    assert [autopack.packing.shard_rows(batch, rank, 2)["num_items_in_batch"] for rank in range(2)] == [7, 7]


def test_labels_that_are_not_shifted_stay_where_they_are():
    ids = torch.arange(1, 9)[None]
    part = autopack.packing.shard_rows({"input_ids": ids, "labels": ids}, 1, 2, shift_labels=False)
    assert part["labels"].tolist() == [[5, 6, 7, 8]]
    assert "shift_labels" not in part
    assert "num_items_in_batch" not in part


def test_what_is_no_tensor_goes_on_and_what_has_another_shape_is_refused():
    ids = torch.arange(1, 9)[None]
    kinds = torch.ones_like(ids)
    part = autopack.packing.shard_rows({"input_ids": ids, "token_type_ids": kinds, "return_dict": True}, 0, 2)
    assert part["token_type_ids"].shape == (1, 4)
    assert part["return_dict"] is True
    with refused("parts-of-rows", match="pixel_values must be"):
        autopack.packing.shard_rows({"input_ids": ids, "pixel_values": torch.zeros(1, 3, 4, 4)}, 0, 2)
    with refused("parts-of-rows"):
        autopack.packing.shard_rows({"input_ids": ids, "position_ids": torch.arange(8).expand(3, 1, 8)}, 0, 2)
    with refused("parts-of-rows"):
        autopack.packing.shard_rows({"inputs_embeds": torch.zeros(1, 8, 4)}, 0, 2)
    with pytest.raises(ValueError, match="0 to 1"):
        autopack.packing.shard_rows({"input_ids": ids}, 2, 2)


def test_one_rank_alone_trains_as_ever():
    """The documented script on one process: nothing is shared, and the loss is that of the rows."""
    model = tiny.build("llama", attn_implementation="sdpa").train()
    autopack.enable(model)
    batch = autopack.PackingCollator()([{"input_ids": tiny.tokens(model.config, 1, n, seed=n)[0]} for n in (5, 9, 3)])
    whole = model(**batch).loss
    part = model(**autopack.packing.shard_rows(batch, 0, 1)).loss
    torch.testing.assert_close(part, whole, rtol=1e-6, atol=0)
