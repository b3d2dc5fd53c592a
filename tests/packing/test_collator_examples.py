"""What the collator reads in an example: masks, documents inside it, keys of any other name."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack.errors import InvalidPacking
from autopack.packing import PackingCollator
from tests.packing.batches import ABC, refused

# Examples that are packed already

PACKED = {
    "position_ids": [0, 1, 2, 0, 1],
    "seq_idx": [0, 0, 0, 1, 1],
    "attention_mask": [1, 1, 1, 2, 2],
    "seq_lengths": [3, 2],
}


@pytest.mark.parametrize("keys", [[k] for k in PACKED] + [list(PACKED)])
def test_inner_documents_are_kept_apart(keys):
    batch = PackingCollator(declare=("attention_mask", "cu_seq_lens"))(
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


def test_positions_that_run_on_into_the_next_document_are_refused():
    own = {"input_ids": [1, 2], "position_ids": [3, 4]}
    refused([ABC[0], own], "example 0, 'position_ids'", "end at 2", "drop_keys")
    own = {"input_ids": [1, 2], "position_ids": [0, 1]}
    refused([own], "example 0", "end at 1", "starts at 2", first_position=2, pad_to_multiple_of=4)
    late = {"input_ids": [4, 5], "position_ids": [4, 5]}
    refused([ABC[0], late], "end at 2, and the next document of the row starts at 4", align=4)
    batch = PackingCollator(align=4)([ABC[0], own])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


# Other keys


def test_other_keys_per_token():
    one = {"input_ids": [1, 2], "weight": [0.5, 1.5], "box": [[1, 2], [3, 4]], "flag": np.array([True, False])}
    two = {"input_ids": [3], "weight": [2], "box": [[5, 6]], "flag": np.array([True])}
    for example, special in ((one, [1, 0]), (two, [0])):
        example |= {"special_tokens_mask": special, "shift_labels": special}
    batch = PackingCollator(pad_to_multiple_of=4)([one, two])
    assert batch["weight"].tolist() == [[0.5, 1.5, 2.0, 0.0]]
    assert batch["weight"].dtype == torch.float32
    assert batch["box"].tolist() == [[[1, 2], [3, 4], [5, 6], [0, 0]]]
    assert batch["flag"].tolist() == [[True, False, True, False]]
    assert batch["flag"].dtype == torch.bool
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 1]], "padding is special"
    assert batch["shift_labels"].tolist() == [[1, 0, 0, -100]], "and no target"


def test_text_is_left_out():
    text = {"text": "a b", "tokens": ["a", "b"], "messages": [{"role": "user"}], "meta": {"a": 1}}
    assert list(PackingCollator()([{"input_ids": [1, 2], **text}])) == ["input_ids", "position_ids", "labels"]


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("scores", np.zeros((3, 4, 4)), "(3, 4, 4)"),
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
    ("key", "value", "found"),
    [
        ("attention_mask", [0, 0, 0], "one token or more"),
        ("attention_mask", [1, 0, 1], "token 1"),
        ("attention_mask", [1, 1], "shape (2,)"),
        ("attention_mask", [0.0, float("-inf"), 0.0], "-inf"),
        ("attention_mask", [[1, 0, 0], [1, 1, 0], [1, 1, 1]], "shape (3, 3)"),
        ("position_ids", [0, 1, 7], "jump from 1 to 7"),
        ("position_ids", [0, 1, -1], "-1"),
        ("position_ids", [0.0, 1.0, 2.0], "float32"),
        ("position_ids", [[0, 1, 2]] * 3, "shape (3, 3)"),
        ("position_ids", [0, 1], "shape (2,)"),
        ("input_ids", [], "no tokens"),
        ("input_ids", torch.zeros(1, 0), "no tokens"),
        ("input_ids", [1.0, 2.0], "float32"),
        ("input_ids", np.array([True]), "bool"),
        ("input_ids", [1, -100], "from -100"),
        ("input_ids", [[1, 2], [3, 4]], "(2, 2)"),
        ("input_ids", 5, "shape ()"),
        ("input_ids", "a b", "<U3"),
        ("input_ids", [1, 2**63], "int too big"),
    ],
)
def test_refused_values_name_the_example_and_the_key(key, value, found):
    refused([ABC[1], {"input_ids": [1, 2, 3], key: value}], f"example 1, {key!r}", found)


def test_refused_batches():
    refused([], "empty batch")
    refused({"input_ids": [[1]]}, "found dict", "list of dicts")
    refused(3, "found int")
    refused([ABC[0], [1, 2]], "example 1", "found list")
    refused([ABC[0], {"text": "a", "ids": [1]}], "example 1", "'input_ids'", "['ids', 'text']", "tokenize")
    refused([{"input_ids": None}], "example 0", "'input_ids'")


def read_twice(examples, **options):
    """What becomes of examples that are read at once, and of the same that are read one by one."""

    def outcome():
        try:
            return {key: (value.dtype, value.tolist()) for key, value in PackingCollator(**options)(examples).items()}
        except (InvalidPacking, OverflowError) as error:
            return str(error)

    found = outcome()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autopack.packing.collator.merge", lambda *_: None)
        return found, outcome()


@given(
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=9), min_size=1, max_size=8),
    st.sampled_from([list, np.array, torch.tensor, lambda ids: np.array(ids, np.int32), tuple]),
    st.sampled_from([(), ("labels",), ("attention_mask",), ("labels", "attention_mask")]),
    st.sampled_from(["auto", "none"]),
)
def test_examples_read_at_once_are_those_read_one_by_one(documents, kind, columns, labels):
    examples = []
    for ids in documents:
        example = {"input_ids": ids, "labels": [-100, *ids[1:]], "attention_mask": [1] * len(ids)}
        examples.append({name: kind(example[name]) for name in ("input_ids", *columns)})
    found, expected = read_twice(examples, labels=labels, declare=("attention_mask", "seq_idx"))
    assert found == expected
    assert isinstance(found, dict)


ODD = {
    "a float": {"input_ids": [1, 2], "labels": [1.0, 2.0]},
    "a class": {"input_ids": [1, 2], "labels": 1},
    "a list of one class": {"input_ids": [1, 2], "labels": [1]},
    "padding": {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]},
    "a column more": {"input_ids": [1, 2], "labels": [1, 2], "weights": [0.5, 0.5]},
    "None": {"input_ids": [1, 2], "labels": None},
    "a vector per token": {"input_ids": [1, 2], "labels": [[1, 2], [3, 4]]},
    "a row": {"input_ids": [[1, 2]], "labels": [[1, 2]]},
    "negative": {"input_ids": [1, -2], "labels": [1, 2]},
    "no tokens": {"input_ids": [], "labels": []},
    "bools": {"input_ids": [True, False], "labels": [1, 2]},
    "text": {"input_ids": ["a", "b"], "labels": [1, 2]},
    "large": {"input_ids": [1 << 63, 2], "labels": [1, 2]},
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_anything_else_is_read_or_refused_one_by_one(odd, order):
    found, expected = read_twice([odd, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}][::order])
    assert found == expected
