"""Rows cut into the parts that ranks share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.packing import shard_rows
from tests.support.refusals import refused

LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)
IDS = torch.arange(1, 9)[None]


def rows_of(lengths):
    """Rows as the collator makes them: padded to the longest, with a mask where there is
    padding."""
    collate = autopack.PackingCollator(max_length=max(map(sum, lengths)), rows=1)
    rows = [
        collate([{"input_ids": torch.arange(1, n + 1) + 10 * i} for i, n in enumerate(row)])
        for row in lengths
    ]
    for row in rows:
        row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def shared(batch, ranks):
    """The parts of all ranks, and these put together."""
    parts = [shard_rows(batch, rank, ranks) for rank in range(ranks)]
    names = [name for name in parts[0] if name != "num_items_in_batch"]
    return parts, {name: torch.cat([part[name] for part in parts], dim=1) for name in names}


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_parts_are_the_rows(lengths, ranks):
    batch = rows_of(lengths)
    parts, whole = shared(batch, ranks)
    labels, columns = batch["labels"], batch["input_ids"].shape[1]
    assert len({part["input_ids"].shape for part in parts}) == 1
    for name in {"input_ids", "position_ids", "attention_mask"} & {*whole}:
        assert torch.equal(whole[name][:, :columns], batch[name])
    # Each token is compared with the next one of its document, and nothing else is.
    assert torch.equal(whole["shift_labels"][:, : columns - 1], labels[:, 1:])
    assert (whole["shift_labels"][:, columns - 1 :] == -100).all()
    assert all(part["num_items_in_batch"] == int((labels != -100).sum()) for part in parts)
    assert all(
        value.is_contiguous()
        for part in parts
        for value in part.values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("seq_idx", [[0] * 3 + [1] * 5]),
        ("attention_mask", [[1] * 3 + [2] * 5]),
        ("cu_seq_lens_q", [0, 3, 8]),
    ],
)
def test_every_declaration_becomes_positions(name, declared):
    declaration = torch.tensor(
        declared, dtype=torch.int64 if name == "attention_mask" else torch.int32
    )
    _, whole = shared({"input_ids": IDS, "labels": IDS, name: declaration}, 3)
    assert whole["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert whole["shift_labels"][0, 2] == -100
    assert whole["attention_mask"].tolist() == [[1] * 8 + [0]]
    assert name != "seq_idx" or whole[name].tolist() == [[0] * 3 + [1] * 5 + [2]]


def test_the_first_token_after_padding_is_predicted_by_nothing():
    """As in every padded batch of an enabled model; positions are those of the columns, as stock
    counts them."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    _, whole = shared(batch, 2)
    assert whole["shift_labels"].tolist() == [[-100] * 3 + [5, 6, 7, 8, -100]]
    assert whole["position_ids"].tolist() == [[*range(8)]]
    assert torch.equal(whole["attention_mask"], mask)


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_the_number_of_items_of_a_step_stays_that_of_the_caller(items):
    parts, _ = shared({"input_ids": IDS, "labels": IDS, "num_items_in_batch": items}, 2)
    assert [part["num_items_in_batch"] for part in parts] == [7, 7]


def test_labels_that_are_not_shifted_stay_where_they_are():
    part = shard_rows({"input_ids": IDS, "labels": IDS}, 1, 2, shift_labels=False)
    assert part["labels"].tolist() == [[5, 6, 7, 8]]
    assert not {"shift_labels", "num_items_in_batch"} & {*part}


def test_what_is_no_tensor_goes_on_and_what_has_another_shape_is_refused():
    part = shard_rows(
        {"input_ids": IDS, "token_type_ids": torch.ones_like(IDS), "return_dict": True}, 0, 2
    )
    assert part["token_type_ids"].shape == (1, 4)
    assert part["return_dict"] is True
    for batch, words in (
        ({"input_ids": IDS, "pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values must be"),
        ({"input_ids": IDS, "position_ids": torch.arange(8).expand(3, 1, 8)}, None),
        ({"inputs_embeds": torch.zeros(1, 8, 4)}, None),
    ):
        with refused("parts-of-rows", match=words):
            shard_rows(batch, 0, 2)
    with pytest.raises(ValueError, match="0 to 1"):
        shard_rows({"input_ids": IDS}, 2, 2)
