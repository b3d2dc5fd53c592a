"""What the collator reads in an example: masks, documents inside it, keys of any other name.

What goes in, and what comes out or is said, stands in collated.json."""

import numpy as np
import pytest
import torch

import autopack
from autopack.packing import PackingCollator
from tests.packing.batches import ABC, KINDS, of_kind, refused, rows_of
from tests.support.refusals import refused as refused_as

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
