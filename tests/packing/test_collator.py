"""The collator: what goes in comes out, once, with its boundaries; whatever cannot is refused by
name."""

import copy
import inspect
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.packing import PackingCollator
from tests.packing.batches import ABC, KINDS, of_kind, refused, rows_of
from tests.support.refusals import refused as refused_as

CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda v: np.array(v, np.int32),
    "uint16": lambda v: np.array(v, np.uint16),
    "tensor": torch.tensor,
    "list of tensors": lambda v: [torch.tensor(i) for i in v],
    "row tensor": lambda v: torch.tensor([v]),
    "row list": lambda v: [v],
}

# What comes out


def same(ours, theirs):
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("with_labels", [False, True])
def test_equals_the_flattening_collator_of_transformers(with_labels):
    wanted = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    known = inspect.signature(transformers.DataCollatorWithFlattening).parameters
    if not wanted.keys() <= known.keys():
        pytest.skip("this transformers release has no such options")
    examples = (
        [{**e, "labels": [i + 10 for i in e["input_ids"]]} for e in ABC] if with_labels else ABC
    )
    theirs = transformers.DataCollatorWithFlattening(**wanted)(copy.deepcopy(examples))
    ours = PackingCollator(declare=("attention_mask", "cu_seq_lens", "seq_idx"))(examples)
    same(ours, theirs)


def test_other_tensors_are_refused():
    with pytest.raises(ValueError, match="return_tensors='tf'"):
        PackingCollator()(ABC, return_tensors="tf")


@pytest.mark.parametrize("kind", CONTAINERS)
@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=9), min_size=1, max_size=8),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([(), ("labels",), ("attention_mask",), ("labels", "attention_mask")]),
    st.sampled_from(["auto", "none"]),
)
def test_any_container_read_at_once_or_one_by_one(kind, documents, padding, columns, labels):
    """Padding is removed from all columns in step."""
    left, right = padding if "attention_mask" in columns else (0, 0)
    examples, plain = [], []
    for ids in documents:
        example = {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}
        plain.append({name: example[name] for name in ("input_ids", *columns)})
        examples.append(
            {n: CONTAINERS[kind]([0] * left + v + [0] * right) for n, v in plain[-1].items()}
        )
    collate = PackingCollator(labels=labels, declare=("attention_mask", "seq_idx"))
    wanted = collate(plain)
    same(collate(examples), wanted)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("autopack.packing.collator.merge", lambda *_: None)
        same(collate(examples), wanted)


def test_examples_are_not_changed():
    example = {name: np.array([0, 1, 1]) for name in ("input_ids", "labels", "attention_mask")}
    batch = PackingCollator()([example])
    batch["input_ids"].zero_()
    batch["labels"].zero_()
    assert [*example] == ["input_ids", "labels", "attention_mask"]
    assert all(value.tolist() == [0, 1, 1] for value in example.values())


@settings(max_examples=150, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.integers(0, 2**40), min_size=1, max_size=9), min_size=1, max_size=9
    ),
    max_length=st.sampled_from([None, 12, 24]),
    multiple=st.sampled_from([None, 1, 3, 4]),
    rows=st.sampled_from([None, 9]),
    limit=st.sampled_from([None, 1, 3]),
    first=st.integers(0, 3),
    data=st.data(),
)
def test_nothing_is_lost_and_every_boundary_is_declared(
    documents, max_length, multiple, rows, limit, first, data
):
    examples = []
    for tokens in documents:
        left, right = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
        columns = {
            "input_ids": (tokens, 5),
            "labels": ([t + 1 for t in tokens], -100),
            "attention_mask": ([1] * len(tokens), 0),
            "weight": ([0.5] * len(tokens), 9.0),
        }
        examples.append(
            {name: [pad] * left + values + [pad] * right for name, (values, pad) in columns.items()}
        )
    if max_length is None:
        rows = limit = None
    options = {"max_length": max_length, "pad_to_multiple_of": multiple, "rows": rows}
    declare = ("attention_mask", "cu_seq_lens", "seq_idx")
    collator = PackingCollator(
        **options, max_documents=limit, first_position=first, declare=declare
    )
    batch = collator(examples, "np")
    count, width = batch["input_ids"].shape
    batch.setdefault("attention_mask", np.ones((count, width), int))
    bounds, fixed = batch["cu_seq_lens_q"], bool(rows and limit)
    longest = width if fixed else max(map(len, documents))

    # Rows are filled in the order of documents, each padded behind to a multiple.
    filled = [[]]
    ends = [0]
    for tokens in documents:
        size = len(tokens)
        if max_length and (ends[-1] + size > max_length or len(filled[-1]) == limit):
            filled.append([])
            ends.append(0)
        row, here = len(filled) - 1, slice(ends[-1], ends[-1] + size)
        wanted = {
            "input_ids": tokens,
            "labels": [-100, *(t + 1 for t in tokens[1:])],
            "weight": [0.5] * size,
            "attention_mask": [1] * size,
            "position_ids": [*range(first, first + size)],
            "seq_idx": [len(filled[-1])] * size,
        }
        assert {name: batch[name][row, here].tolist() for name in wanted} == wanted
        assert {row * width + here.start, row * width + here.stop} <= set(bounds.tolist())
        filled[-1].append(tokens)
        ends[-1] += size
    assert count == (rows or len(filled))
    assert (
        width == max_length if rows else width == -(-max(ends) // (multiple or 1)) * (multiple or 1)
    )
    # and padding, cut into documents as long as those
    for row, end in enumerate(ends + [0] * (count - len(filled))):
        for name, value in (
            ("input_ids", 0),
            ("labels", -100),
            ("weight", 0.0),
            ("attention_mask", 0),
        ):
            assert set(batch[name][row, end:].tolist()) <= {value}
    assert batch["position_ids"].max() < first + longest
    assert batch["max_length_q"] == batch["max_length_k"] == longest
    assert np.array_equal(bounds, batch["cu_seq_lens_k"])
    assert not fixed or len(bounds) == rows * (limit + 1) + 1
    for begin, end in pairwise(bounds.tolist()):
        assert fixed or batch["position_ids"].flat[begin:end].tolist() == [
            *range(first, first + end - begin)
        ]


# Labels


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [*rows_of("labels"), ([1, 2], np.array([1, 2**63], np.uint64), "found uint64")],
)
def test_refused_labels_name_the_example_and_the_key(first, second, found):
    examples = [{"input_ids": [1, 2], "labels": first}, {"input_ids": [3, 4], "labels": second}]
    refused(examples, "example 1, 'labels'", found)


# What the collator reads in an example: masks, documents inside it, keys of any other name.

SCALARS = [torch.tensor(1), torch.tensor(0), torch.tensor(2)]
VECTORS = [np.ones(1), np.zeros(1, np.float32), torch.ones(1, dtype=torch.bfloat16)]
OF_ARRAYS = [
    *(
        (
            {},
            [{**example, "label": value} for example, value in zip(ABC, values, strict=True)],
            wanted,
        )
        for values, wanted in (
            (SCALARS, {"labels": [1, 0, 2]}),
            (VECTORS, {"labels": [[1.0], [0.0], [1.0]]}),
        )
    ),
    (
        {},
        [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([k])} for k in (3, 4)],
        {"labels": [3, 4]},
    ),
    ({}, [ABC[0] | {"label_ids": np.array([7, -100, 9])}], {"labels": [[-100, -100, 9]]}),
    ({}, [ABC[1] | {"flag": np.array([True, False])}], {"flag": [[True, False]]}),
]


@pytest.mark.parametrize(("options", "examples", "wanted"), [*rows_of("collated"), *OF_ARRAYS])
def test_batches_hold_what_examples_say(options, examples, wanted):
    """In numbers of the same kind; `None` stands for what a batch does not have."""
    batch = PackingCollator(**options)(examples)
    found = {name: batch[name].tolist() if name in batch else None for name in wanted}
    assert repr(found) == repr(wanted)


@pytest.mark.parametrize(("options", "examples", "parts"), rows_of("refused"))
def test_batches_that_are_refused(options, examples, parts):
    refused(examples, *parts, **options)


# Other keys


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        *rows_of("values"),
        ("complex", np.zeros(2, complex), "complex128"),
        ("input_ids", np.array([True]), "bool"),
    ],
)
def test_refused_values_name_the_example_and_the_key(key, value, part):
    examples = [ABC[1], {"input_ids": [1, 2, 3], key: value}]
    refused(examples, f"example 1, {key!r}", part)
    if key != "input_ids":
        batch = PackingCollator(drop_keys=(key,))(examples)
        assert [*batch] == ["input_ids", "position_ids", "labels"]


# Pairs are no documents


TOKENS = [{"chosen_ids": [1, 2], "rejected_ids": [3, 4]}] * 2
MIXED = [{"input_ids": [5, 6], "chosen": "good", "rejected": "bad"}] * 2


@pytest.mark.parametrize("examples", [TOKENS, MIXED])
def test_pairs_are_no_documents_unless_they_are_named(examples):
    with refused_as("pairs-are-no-documents"):
        PackingCollator()(examples)
    for kind in KINDS:
        with refused_as("pairs-are-no-documents"):
            list(autopack.pack(of_kind(examples, kind), 8))
    names = [name for name in examples[0] if name.startswith(("chosen", "rejected"))]
    collate = PackingCollator(drop_keys=names)
    if examples is MIXED:
        assert collate(examples)["input_ids"].tolist() == [[5, 6, 5, 6]]
        assert autopack.pack(examples, 8, drop_columns=names)[0]["input_ids"] == [5, 6, 5, 6]
        return
    for call in (collate, lambda given: autopack.pack(given, 8, drop_columns=names)):
        with refused_as("unusable-data", match="tokenize first"):
            call(examples)
