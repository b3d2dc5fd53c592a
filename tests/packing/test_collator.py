"""The collator: what goes in comes out, once, with its boundaries; whatever cannot is refused by name."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from autopack.errors import InvalidPacking
from autopack.packing import PackingCollator
from autopack.positions import AFTER_PAD_TOKEN, AT_CONSTANT

ABC = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]


def starts_of(positions: np.ndarray) -> list[int]:
    return [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist()]


def refused(examples: Any, *parts: str, **options: Any) -> str:
    """The message of the refusal, which has all of `parts`."""
    with pytest.raises(InvalidPacking) as error:
        PackingCollator(**options)(examples)
    for part in parts:
        assert part in str(error.value)
    return str(error.value)


# What comes out


def test_one_row_with_restarting_positions_and_first_labels_ignored():
    batch = PackingCollator()(ABC)
    assert list(batch) == ["input_ids", "position_ids", "labels"]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 7, 8, 9]]
    assert {v.dtype for v in batch.values()} == {torch.int64}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[key], value), key
            assert ours[key].dtype == value.dtype, key
        else:
            assert ours[key] == value, key
            assert type(ours[key]) is type(value), key


@pytest.mark.parametrize("with_labels", [False, True])
def test_equals_the_flattening_collator_of_transformers(with_labels):
    wanted = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    known = inspect.signature(transformers.DataCollatorWithFlattening).parameters
    if not wanted.keys() <= known.keys():
        pytest.skip("this transformers release has no such options")
    examples = [{**e, "labels": [i + 10 for i in e["input_ids"]]} for e in ABC] if with_labels else ABC
    theirs = transformers.DataCollatorWithFlattening(**wanted)(copy.deepcopy(examples))
    ours = PackingCollator(return_flash_kwargs=True, return_seq_idx=True)(examples)
    assert ours.keys() == theirs.keys()
    same(ours, theirs)


def test_numpy_out():
    batch = PackingCollator(return_tensors="np")(ABC)
    assert all(isinstance(v, np.ndarray) for v in batch.values())
    assert isinstance(PackingCollator()(ABC, return_tensors="np")["input_ids"], np.ndarray)
    with pytest.raises(ValueError, match="return_tensors='tf'"):
        PackingCollator()(ABC, return_tensors="tf")


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda v: np.array(v, np.int32),
    "uint16": lambda v: np.array(v, np.uint16),
    "tensor": torch.tensor,
    "list of tensors": lambda v: [torch.tensor(i) for i in v],
    "list of numpy ints": lambda v: [np.int64(i) for i in v],
    "row tensor": lambda v: torch.tensor([v]),
    "row list": lambda v: [v],
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_any_container(kind):
    made = CONTAINERS[kind]
    examples = [{"input_ids": made(e["input_ids"]), "labels": made(e["input_ids"])} for e in ABC]
    batch, wanted = PackingCollator()(examples), PackingCollator()(ABC)
    same(batch, wanted)


def test_batch_encodings_of_a_tokenizer():
    examples = [transformers.BatchEncoding({**e, "attention_mask": [1] * len(e["input_ids"])}) for e in ABC]
    same(PackingCollator()(examples), PackingCollator()(ABC))
    as_rows = [transformers.BatchEncoding(e, tensor_type="pt", prepend_batch_axis=True) for e in examples]
    assert as_rows[0]["input_ids"].shape == (1, 3)
    same(PackingCollator()(as_rows), PackingCollator()(ABC))


def test_examples_are_not_changed():
    examples = [
        {"input_ids": np.array([1, 2, 3]), "labels": np.array([1, 2, 3]), "attention_mask": np.array([0, 1, 1])}
    ]
    before = copy.deepcopy(examples)
    batch = PackingCollator()(examples)
    batch["input_ids"].zero_()
    batch["labels"].zero_()
    assert examples[0].keys() == before[0].keys()
    for key, value in before[0].items():
        assert np.array_equal(examples[0][key], value)


documents_strategy = st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(max_examples=80, deadline=None)
@given(
    documents=documents_strategy,
    max_tokens=st.one_of(st.none(), st.integers(9, 20)),
    multiple=st.one_of(st.none(), st.integers(1, 7)),
    first=st.integers(0, 3),
    data=st.data(),
)
def test_nothing_is_lost_and_every_boundary_is_declared(documents, max_tokens, multiple, first, data):
    if max_tokens and multiple:
        max_tokens += -max_tokens % multiple
    examples = []
    for tokens in documents:
        left, right = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        examples.append(
            {
                "input_ids": [5] * left + tokens + [5] * right,
                "labels": [-100] * left + [t + 1 for t in tokens] + [-100] * right,
                "attention_mask": [0] * left + [1] * len(tokens) + [0] * right,
                "weight": [9.0] * left + [0.5] * len(tokens) + [9.0] * right,
            }
        )
    collator = PackingCollator(
        max_tokens=max_tokens,
        pad_to_multiple_of=multiple,
        first_position=first,
        pad_token_id=3,
        return_flash_kwargs=True,
        return_seq_idx=True,
        return_tensors="np",
    )
    batch = collator(examples)
    rows, width = batch["input_ids"].shape
    assert max_tokens is None or width <= max_tokens
    assert max_tokens is not None or rows == 1
    assert width % (multiple or 1) == 0
    real = batch.get("attention_mask", np.ones((rows, width), int)).astype(bool)
    assert batch["input_ids"][real].tolist() == [t for tokens in documents for t in tokens]
    assert batch["weight"][real].tolist() == [0.5] * int(real.sum())
    assert set(batch["input_ids"][~real].tolist()) <= {3}
    assert set(batch["labels"][~real].tolist()) <= {-100}
    assert set(batch["weight"][~real].tolist()) <= {0.0}
    wanted = [label for tokens in documents for label in [-100, *(t + 1 for t in tokens[1:])]]
    assert batch["labels"][real].tolist() == wanted

    lengths, bounds = [], []
    for row in range(rows):
        starts = starts_of(batch["position_ids"][row])
        assert starts == [0, *(np.flatnonzero(np.diff(batch["seq_idx"][row])) + 1).tolist()]
        assert batch["seq_idx"][row][starts].tolist() == list(range(len(starts)))
        assert set(batch["position_ids"][row][starts].tolist()) == {first}
        lengths += [end - start for start, end in zip(starts, [*starts[1:], width], strict=True) if real[row, start]]
        bounds += [row * width + start for start in starts]
    assert lengths == [len(tokens) for tokens in documents]
    assert batch["cu_seq_lens_q"].tolist() == [*bounds, rows * width]
    assert np.array_equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert batch["max_length_q"] == batch["max_length_k"] == max(lengths)
    assert batch["position_ids"].max() == first + max(lengths) - 1


# Labels


@pytest.mark.parametrize("key", ["labels", "label", "label_ids"])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 0, 2], torch.int64),
        ([np.int32(1), np.int64(0), np.uint8(2)], torch.int64),
        ([torch.tensor(1), torch.tensor(0), torch.tensor(2)], torch.int64),
        ([True, False, True], torch.int64),
        ([1.5, 0.0, -2.0], torch.float32),
        ([np.float64(1.5), 0, -2], torch.float32),
        ([[1.0, 0.0], [0.0, 0.5], (1.0, 1.0)], torch.float32),
        ([np.ones(3), np.zeros(3, np.float32), torch.ones(3, dtype=torch.bfloat16)], torch.float32),
    ],
)
def test_labels_per_document(key, values, dtype):
    batch = PackingCollator(max_tokens=5)([{**e, key: v} for e, v in zip(ABC, values, strict=True)])
    assert batch["input_ids"].shape == (2, 5)
    assert batch["labels"].dtype == dtype
    assert batch["labels"].tolist() == [np.asarray(torch.as_tensor(v).float()).tolist() for v in values]
    assert key == "labels" or key not in batch


def test_per_document_labels_of_row_tensors():
    examples = [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([k])} for k in (3, 4)]
    assert PackingCollator()(examples)["labels"].tolist() == [3, 4]


def test_labels_per_token_under_another_name():
    batch = PackingCollator()([{"input_ids": [1, 2, 3], "label_ids": np.array([7, -100, 9])}])
    assert batch["labels"].tolist() == [[-100, -100, 9]]


def test_labels_can_be_required_or_left_out():
    refused(ABC, "example 0, 'labels': not found", "labels='none'", labels="required")
    assert "labels" not in PackingCollator(labels="none")(ABC)
    assert "labels" not in PackingCollator(labels="none")([{"input_ids": [1], "labels": [1], "label": 3}])
    assert PackingCollator()([{"input_ids": [1, 2], "labels": None}])["labels"].tolist() == [[-100, 2]]


def test_losses_that_do_not_shift_keep_the_first_label():
    batch = PackingCollator(mask_first_label=False)([{"input_ids": [1, 2], "labels": [5, 6]}])
    assert batch["labels"].tolist() == [[5, 6]]
    refused(ABC, "example 0, 'labels': not found", "mask_first_label=False", mask_first_label=False)


@pytest.mark.parametrize("key", ["completion_mask", "assistant_masks"])
def test_made_labels_keep_to_the_completion(key):
    batch = PackingCollator()([{"input_ids": [1, 2, 3, 4], key: [0, 0, 1, 1]}])
    assert batch["labels"].tolist() == [[-100, -100, 3, 4]]
    assert batch[key].tolist() == [[0, 0, 1, 1]]
    given_labels = PackingCollator()([{"input_ids": [1, 2, 3, 4], key: [0, 0, 1, 1], "labels": [1, 2, 3, 4]}])
    assert given_labels["labels"].tolist() == [[-100, 2, 3, 4]]


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        (1, [1, 2], ["'labels'", "labels per token", "labels per document in example 0"]),
        ([1, 2], None, ["'labels'", "no labels", "labels per token in example 0"]),
        (None, 2.0, ["'labels'", "labels per document", "no labels in example 0"]),
        ([1, 2], [1, 2, 3], ["'labels'", "shape (3,)", "2 tokens"]),
        ([0.5, 0.5], [0.1, 0.2, 0.3], ["'labels'", "(3,)", "(2,) in example 0", "floats"]),
        (0.5, [0.1, 0.2], ["'labels'", "(2,)", "() in example 0"]),
        (1, "positive", ["'labels'", "<U8"]),
        ([1, 2], ["B", "O"], ["'labels'", "<U1"]),
        ([1, 2], [1, 2**63], ["'labels'", "int too big"]),
        ([1, 2], np.array([1, 2**63], np.uint64), ["'labels'", "found uint64"]),
        ([1, 2], [1, None], ["'labels'", "found object"]),
        ([1, 2], [[1], [2, 3]], ["'labels'", "cannot be read as numbers"]),
        ([1, 2], [[1, 2]], ["'labels'", "shape (1, 2)"]),
    ],
)
def test_refused_labels_name_the_example_and_the_key(first, second, parts):
    refused([{"input_ids": [1, 2], "labels": first}, {"input_ids": [3, 4], "labels": second}], "example 1", *parts)


def test_two_names_for_labels_are_refused():
    refused([{"input_ids": [1], "label": 1, "labels": [1]}], "example 0, 'label'", "'labels'", "drop_keys")
    batch = PackingCollator(drop_keys=("label",))([{"input_ids": [1, 2], "label": 1, "labels": [1, 2]}])
    assert batch["labels"].tolist() == [[-100, 2]]


# Padding inside the examples


@pytest.mark.parametrize("kind", ["list", "numpy", "tensor", "row tensor"])
@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
def test_padding_tokens_are_removed_in_step(kind, mask):
    made = CONTAINERS[kind]
    example = {
        "input_ids": made([1, 2, 3, 4, 5]),
        "attention_mask": made(mask),
        "labels": made([11, 12, 13, 14, 15]),
        "token_type_ids": made([21, 22, 23, 24, 25]),
    }
    kept = [i for i, m in zip([1, 2, 3, 4, 5], mask, strict=True) if m]
    batch = PackingCollator()([example, {"input_ids": [7], "labels": [8], "token_type_ids": [9]}])
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [[*kept, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert batch["labels"].tolist() == [[-100, kept[1] + 10, kept[2] + 10, -100]]
    assert batch["token_type_ids"].tolist() == [[*(k + 20 for k in kept), 9]]


@pytest.mark.parametrize(
    ("mask", "parts"),
    [
        ([0, 0, 0], ["one token or more"]),
        ([1, 0, 1], ["token 1", "take such tokens out"]),
        ([1, 1], ["shape (2,)", "3 tokens"]),
        ([0.0, float("-inf"), 0.0], ["-inf"]),
        ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], ["shape (3, 3)"]),
    ],
)
def test_refused_masks_name_the_example(mask, parts):
    refused([ABC[0], {"input_ids": [1, 2, 3], "attention_mask": mask}], "example 1, 'attention_mask'", *parts)


# Examples that are packed already

PACKED = {
    "position_ids": [0, 1, 2, 0, 1],
    "seq_idx": [0, 0, 0, 1, 1],
    "attention_mask": [1, 1, 1, 2, 2],
    "seq_lengths": [3, 2],
}


@pytest.mark.parametrize("keys", [[k] for k in PACKED] + [list(PACKED)])
def test_inner_documents_are_kept_apart(keys):
    batch = PackingCollator(return_flash_kwargs=True)(
        [{"input_ids": [1, 2, 3, 4, 5]} | {k: PACKED[k] for k in keys}, {"input_ids": [6, 7]}]
    )
    assert list(batch)[:3] == ["input_ids", "position_ids", "labels"]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 7]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7]
    assert not {"seq_idx", "attention_mask", "seq_lengths"} & batch.keys()


@pytest.mark.parametrize(("first", "second"), [(k, o) for k in PACKED for o in PACKED if k < o])
def test_declarations_that_disagree_are_refused(first, second):
    other = {
        "position_ids": [0, 1, 0, 1, 2],
        "seq_idx": [3, 3, 4, 4, 4],
        "attention_mask": [1, 1, 2, 2, 2],
        "seq_lengths": [2, 3],
    }
    example = {"input_ids": [1, 2, 3, 4, 5], first: PACKED[first], second: other[second]}
    refused([ABC[0], example], "example 1", first, second, "[0, 3]", "[0, 2]")


def test_labels_per_document_of_packed_examples():
    packed = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}
    batch = PackingCollator()([packed | {"labels": [7, 8]}, {"input_ids": [6, 7], "labels": 9}])
    assert batch["labels"].tolist() == [7, 8, 9]
    batch = PackingCollator()([packed | {"labels": [[0.5, 1.0], [1.5, 2.0]]}, {"input_ids": [6], "labels": [3.0, 4.0]}])
    assert batch["labels"].tolist() == [[0.5, 1.0], [1.5, 2.0], [3.0, 4.0]]
    refused([packed | {"label": 7}], "example 0, 'label'", "2 document(s)")


def test_own_positions_are_kept():
    batch = PackingCollator()([{"input_ids": [1, 2, 3, 4, 5], "position_ids": [5, 6, 7, 0, 1]}, {"input_ids": [6, 7]}])
    assert batch["position_ids"].tolist() == [[5, 6, 7, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5, -100, 7]]


@pytest.mark.parametrize(
    ("positions", "parts"),
    [
        ([0, 1, 7], ["jump from 1 to 7", "drop_keys"]),
        ([0, 1, -1], ["-1"]),
        ([0.0, 1.0, 2.0], ["float32"]),
        ([[0, 1, 2]] * 3, ["shape (3, 3)"]),
        ([0, 1], ["shape (2,)", "3 tokens"]),
    ],
)
def test_refused_positions(positions, parts):
    refused([ABC[1], {"input_ids": [1, 2, 3], "position_ids": positions}], "example 1, 'position_ids'", *parts)


def test_positions_that_run_on_into_the_next_document_are_refused():
    message = refused([ABC[0], {"input_ids": [1, 2], "position_ids": [3, 4]}], "example 0, 'position_ids'", "drop_keys")
    assert "end at 2" in message
    message = refused(
        [{"input_ids": [1, 2], "position_ids": [0, 1]}], "example 0", "end at 1", first_position=2, pad_to_multiple_of=4
    )
    assert "starts at 2" in message


# Rows and padding


def test_rows_are_filled_in_order_and_padded_to_the_longest():
    collator = PackingCollator(max_tokens=6, pad_token_id=50, return_flash_kwargs=True, return_seq_idx=True)
    examples = [{**e, "token_type_ids": [1] * len(e["input_ids"])} for e in ABC]
    batch = collator(examples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 50]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 5], [-100, 7, 8, 9, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["token_type_ids"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 10]
    assert batch["seq_idx"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], type(batch["max_length_q"])) == (4, int)


def test_padding_is_cut_into_documents_no_longer_than_the_real_ones():
    batch = PackingCollator(pad_to_multiple_of=16, first_position=2)(ABC)
    assert batch["position_ids"].tolist() == [[2, 3, 4, 2, 3, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1] * 9 + [0] * 7]
    without = PackingCollator(pad_to_multiple_of=16, first_position=2, return_attention_mask=False)(ABC)
    assert "attention_mask" not in without
    assert torch.equal(without["position_ids"], batch["position_ids"])
    assert "attention_mask" not in PackingCollator(pad_to_multiple_of=3)(ABC)


def test_overlong_examples():
    refused(ABC, "example 2, 'input_ids'", "4 tokens", "max_tokens=3", "overlong='truncate'", max_tokens=3)
    batch = PackingCollator(max_tokens=3, overlong="truncate")(ABC)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 8]]
    packed = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2], "labels": [7, 8]}
    batch = PackingCollator(max_tokens=3, overlong="truncate")([packed])
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[1, 2, 3]], [7])
    padded = {"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    assert PackingCollator(max_tokens=3)([padded])["input_ids"].tolist() == [[1, 2, 3]]


# Other keys


def test_other_keys_per_token():
    batch = PackingCollator(pad_to_multiple_of=4)(
        [
            {"input_ids": [1, 2], "weight": [0.5, 1.5], "box": [[1, 2], [3, 4]], "flag": np.array([True, False])},
            {"input_ids": [3], "weight": [2], "box": [[5, 6]], "flag": np.array([True])},
        ]
    )
    assert batch["weight"].tolist() == [[0.5, 1.5, 2.0, 0.0]]
    assert batch["weight"].dtype == torch.float32
    assert batch["box"].tolist() == [[[1, 2], [3, 4], [5, 6], [0, 0]]]
    assert batch["flag"].tolist() == [[True, False, True, False]]
    assert batch["flag"].dtype == torch.bool


def test_padding_of_special_tokens_mask_and_shift_labels():
    example = {"input_ids": [1, 2, 3], "special_tokens_mask": [1, 0, 0], "shift_labels": [2, 3, -100]}
    batch = PackingCollator(pad_to_multiple_of=4)([example])
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 1]]
    assert batch["shift_labels"].tolist() == [[2, 3, -100, -100]]


def test_text_is_left_out():
    example = {
        "input_ids": [1, 2],
        "text": "a b",
        "tokens": ["a", "b"],
        "messages": [{"role": "user"}],
        "meta": {"a": 1},
    }
    assert list(PackingCollator()([example])) == ["input_ids", "position_ids", "labels"]


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("pixel_values", np.zeros((3, 4, 4)), "(3, 4, 4)"),
        ("idx", 7, "()"),
        ("length", [2], "(1,)"),
        ("cu_seq_lens_q", [0, 1, 2], "(3,)"),
        ("word_ids", [None, 0], "object"),
        ("spans", [[1], [2, 3]], "cannot be read as numbers"),
        ("complex", np.zeros(2, complex), "complex128"),
    ],
)
def test_what_is_not_per_token_is_refused_unless_dropped(key, value, part):
    examples = [ABC[1], {"input_ids": [1, 2], key: value}]
    refused(examples, f"example 1, {key!r}", part, "drop_keys")
    assert list(PackingCollator(drop_keys=(key,))(examples)) == ["input_ids", "position_ids", "labels"]


def test_keys_that_only_some_examples_have_are_refused():
    one, two = {"input_ids": [1, 2]}, {"input_ids": [1, 2], "weight": [1.0, 1.0]}
    refused([two, one], "example 1, 'weight'", "example 0 has it")
    refused([one, two], "example 0, 'weight'", "example 1 has it")
    wide = {"input_ids": [1], "weight": [[1.0, 2.0]]}
    refused([two, wide], "example 1, 'weight'", "(2,)", "()")


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ([], ["no tokens"]),
        (torch.zeros(1, 0), ["no tokens"]),
        ([1.0, 2.0], ["float32"]),
        ([True, False][:0] or np.array([True]), ["bool"]),
        ([1, -100], ["from -100"]),
        ([[1, 2], [3, 4]], ["(2, 2)"]),
        (5, ["shape ()"]),
        ("a b", ["<U3"]),
        ([1, 2**63], ["int too big"]),
    ],
)
def test_refused_ids_name_the_example(ids, parts):
    refused([ABC[0], {"input_ids": ids}], "example 1, 'input_ids'", *parts)


def test_refused_batches():
    refused([], "empty batch")
    refused({"input_ids": [[1]]}, "found dict", "list of dicts")
    refused(3, "found int")
    refused([ABC[0], [1, 2]], "example 1", "found list")
    refused([ABC[0], {"text": "a", "ids": [1]}], "example 1", "'input_ids'", "['ids', 'text']", "tokenize")
    refused([{"input_ids": None}], "example 0", "'input_ids'")


# The object


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"labels": "yes"}, "labels='yes'"),
        ({"overlong": "drop"}, "overlong='drop'"),
        ({"return_tensors": "tf"}, "return_tensors='tf'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"pad_to_multiple_of": 1.5}, "pad_to_multiple_of=1.5"),
        ({"first_position": -1}, "first_position=-1"),
        ({"pad_token_id": None}, "pad_token_id=None"),
        ({"drop_keys": "text"}, "drop_keys='text'"),
        ({"max_tokens": 10, "pad_to_multiple_of": 4}, "multiple"),
    ],
)
def test_refused_options(options, part):
    with pytest.raises(ValueError, match=part):
        PackingCollator(**options)


def test_repr_pickle_and_copy():
    collator = PackingCollator(max_tokens=64, first_position=2)
    assert repr(collator) == "PackingCollator(first_position=2, max_tokens=64)"
    assert repr(PackingCollator()) == "PackingCollator()"
    assert pickle.loads(pickle.dumps(collator)) == collator == copy.deepcopy(collator)


class Documents(Dataset):
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(range(index, index + self.lengths[index]))}


@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "spawn")])
def test_collate_fn_of_a_dataloader(workers, context):
    collator = PackingCollator(return_flash_kwargs=True)
    loader = DataLoader(
        Documents([3, 2, 4, 1]), batch_size=2, collate_fn=collator, num_workers=workers, multiprocessing_context=context
    )
    first, second = loader
    assert first["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3, 0]]
    assert second["max_length_q"] == 4


def test_importing_needs_neither_torch_nor_transformers():
    code = (
        "import sys, autopack.packing as p; c = p.PackingCollator(return_tensors='np'); c([{'input_ids': [1]}]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Models


def tiny_llama(**options: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 53),
    reason="stock Llama is exact on packed rows from 4.53 on, without a cache",
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 16, "return_attention_mask": False, "pad_to_multiple_of": 8}])
def test_the_packed_loss_is_the_token_mean_over_separate_documents(attention, options):
    model = tiny_llama(attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(1)
    examples = [{"input_ids": torch.randint(1, 97, (n,), generator=generator)} for n in (7, 12, 1, 9, 4)]
    with torch.no_grad():
        packed = model(**PackingCollator(**options)(examples), use_cache=False).loss
        total = count = 0
        for example in examples:
            ids = example["input_ids"][None]
            logits = model(ids, use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
    torch.testing.assert_close(packed, total / count, rtol=1e-5, atol=1e-5)


def test_data_collator_of_a_trainer(tmp_path):
    pytest.importorskip("accelerate")
    counted = []

    class Counting(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            counted.append((kwargs.get("num_items_in_batch"), sorted(inputs)))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Counting(
        model=tiny_llama(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True
        ),
        train_dataset=Documents([3, 2, 4, 1]),
        data_collator=PackingCollator(),
    )
    trainer.train()
    assert sorted(int(items) for items, _ in counted if items is not None) in ([3, 3], [1, 5], [2, 4])
    assert all(keys == ["input_ids", "labels", "position_ids"] for _, keys in counted)


TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
}
KOSMOS = {"vocab_size": 50, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2, "pad_token_id": 3}
EXTRA: dict[str, dict[str, Any]] = {
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 4},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 4, "shape_size": 4},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 5, "entity_emb_size": 16},
    "mpnet": {"pad_token_id": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
TOWERS = {
    "altclip_text_model": ("altclip", "AltCLIPTextConfig", ("AltRobertaModel", "AltCLIPTextModel")),
    "bridgetower_text_model": ("bridgetower", "BridgeTowerTextConfig", ("BridgeTowerTextModel",)),
    "clap_text_model": ("clap", "ClapTextConfig", ("ClapTextModel",)),
    "kosmos_2_text_model": ("kosmos2", "Kosmos2TextConfig", ("Kosmos2TextModel",)),
    "kosmos_2_5_text_model": ("kosmos2_5", "Kosmos2_5TextConfig", ("Kosmos2_5TextModel",)),
}


def tiny_of(model_type: str) -> transformers.PreTrainedModel:
    if model_type not in TOWERS:
        if model_type not in transformers.CONFIG_MAPPING:
            pytest.skip(f"this transformers release has no {model_type}")
        config = transformers.AutoConfig.for_model(model_type, **TINY | EXTRA.get(model_type, {}))
        return transformers.AutoModel.from_config(config)
    folder, config_name, names = TOWERS[model_type]
    configuration = pytest.importorskip(f"transformers.models.{folder}.configuration_{folder}")
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(configuration, config_name)(**KOSMOS if "kosmos" in folder else TINY)
    return next(getattr(modeling, name) for name in names if hasattr(modeling, name))(config)


@pytest.mark.parametrize("model_type", sorted(AFTER_PAD_TOKEN | AT_CONSTANT.keys()))
def test_for_model_starts_where_the_model_itself_starts(model_type):
    torch.manual_seed(0)
    model = tiny_of(model_type).eval()
    collator = PackingCollator.for_model(model)
    assert collator == PackingCollator.for_model(model.config)
    assert collator.first_position > 0
    batch = collator([{"input_ids": [5, 6, 7, 8, 9, 10]}])
    with torch.no_grad():
        alone = model(batch["input_ids"])[0]
        packed = model(batch["input_ids"], position_ids=batch["position_ids"])[0]
        shifted = model(batch["input_ids"], position_ids=batch["position_ids"] + 1)[0]
    torch.testing.assert_close(packed, alone)
    assert (shifted - alone).abs().max() > 1e-3


def test_for_model_reads_the_head_and_lets_options_win():
    bert = transformers.BertConfig(**TINY)
    assert PackingCollator.for_model(bert) == PackingCollator(pad_token_id=3)
    for head in (transformers.BertForMaskedLM, transformers.BertForTokenClassification):
        model = head(bert)
        assert PackingCollator.for_model(model) == PackingCollator(pad_token_id=3, mask_first_label=False)
        assert PackingCollator.for_model(torch.nn.DataParallel(model)).mask_first_label is False
    assert PackingCollator.for_model(transformers.BertForSequenceClassification(bert)).mask_first_label
    assert PackingCollator.for_model(transformers.AltCLIPConfig()) == PackingCollator(first_position=2, pad_token_id=1)
    llama = tiny_llama()
    assert PackingCollator.for_model(llama, max_tokens=8) == PackingCollator(max_tokens=8)
    roberta = transformers.RobertaConfig(**TINY)
    wanted = PackingCollator(first_position=7, pad_token_id=9)
    assert PackingCollator.for_model(roberta, first_position=7, pad_token_id=9) == wanted
    roberta.pad_token_id = None
    with pytest.raises(ValueError, match=r"roberta: wanted config\.pad_token_id"):
        PackingCollator.for_model(roberta)
    with pytest.raises(ValueError, match="found Linear"):
        PackingCollator.for_model(torch.nn.Linear(1, 1))


def test_for_model_sees_through_peft():
    peft = pytest.importorskip("peft")
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**TINY))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    wanted = PackingCollator(first_position=4, pad_token_id=3, mask_first_label=False)
    assert PackingCollator.for_model(wrapped) == wanted
