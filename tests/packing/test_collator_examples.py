"""What the collator reads in an example: masks, documents inside it, keys of any other name."""

import numpy as np
import pytest
import torch

import autopack
from autopack.packing import PackingCollator
from tests.packing.batches import ABC, KINDS, of_kind, refused
from tests.support.refusals import refused as refused_as

# Examples that are packed already

PACKED = {
    "position_ids": [0, 1, 2, 0, 1],
    "seq_idx": [0, 0, 0, 1, 1],
    "attention_mask": [1, 1, 1, 2, 2],
    "seq_lengths": [3, 2],
}


ROW = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}
OWN = {"input_ids": [1, 2], "position_ids": [0, 1]}
CUT = {"max_length": 3, "overflow": "truncate"}
MASK = [0, 0, 1, 1]
TEXT = {"text": "a b", "tokens": ["a", "b"], "messages": [{"role": "user"}], "meta": {"a": 1}}
TOKENS = {"weight": [0.5, 1.5], "box": [[1, 2], [3, 4]], "flag": np.array([True, False])}
ONE_PATCH = {"pixel_values": np.zeros((1, 4, 3), np.float32)}
PATCHES = {
    "pixel_values": np.zeros((2, 4, 3), np.float32),
    "image_token_pooling": [[0, 1], [7, -1]],
}
COLLATED = [
    # Documents inside of examples.
    *(
        (
            {"declare": ("attention_mask", "cu_seq_lens")},
            [{"input_ids": [1, 2, 3, 4, 5]} | declared, {"input_ids": [6, 7]}],
            {
                "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
                "labels": [[-100, 2, 3, -100, 5, -100, 7]],
                "cu_seq_lens_q": [0, 3, 5, 7],
                **dict.fromkeys(("seq_idx", "attention_mask", "seq_lengths")),
            },
        )
        for declared in (PACKED, *({key: value} for key, value in PACKED.items()))
    ),
    (
        {},
        [{"input_ids": [1, 2, 3, 4, 5], "position_ids": [5, 6, 7, 0, 1]}, {"input_ids": [6, 7]}],
        {"position_ids": [[5, 6, 7, 0, 1, 0, 1]], "labels": [[-100, 2, 3, -100, 5, -100, 7]]},
    ),
    # Labels per document, of other names, left out.
    *(
        (
            {"max_length": 5},
            [{**example, key: value} for example, value in zip(ABC, values, strict=True)],
            {"labels": wanted, "input_ids": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]]},
        )
        for key, values, wanted in (
            ("labels", [torch.tensor(1), torch.tensor(0), torch.tensor(2)], [1, 0, 2]),
            ("label", [0.1, 0.0, -2.0], [float(np.float32(0.1)), 0.0, -2.0]),
            (
                "label_ids",
                [[1.0, 0.0], [0.0, 0.5], (1.0, 1.0)],
                [[1.0, 0.0], [0.0, 0.5], [1.0, 1.0]],
            ),
            (
                "label",
                [np.ones(1), np.zeros(1, np.float32), torch.ones(1, dtype=torch.bfloat16)],
                [[1.0], [0.0], [1.0]],
            ),
        )
    ),
    ({}, [ROW | {"labels": [7, 8]}, OWN | {"labels": 9}], {"labels": [7, 8, 9]}),
    (
        {},
        [{"input_ids": [1, 2, 3, 4, 5], "position_ids": PACKED["position_ids"], "label": [7, 8]}],
        {"labels": [7, 8]},
    ),
    (
        {},
        [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([k])} for k in (3, 4)],
        {"labels": [3, 4]},
    ),
    ({}, [ABC[0] | {"label_ids": np.array([7, -100, 9])}], {"labels": [[-100, -100, 9]]}),
    ({}, [OWN | {"labels": None}], {"labels": [[-100, 2]]}),
    ({"labels": "unshifted"}, [OWN | {"labels": [5, 6]}], {"labels": [[5, 6]]}),
    ({"labels": "none"}, [OWN | {"labels": [1, 2], "label": 3}], {"labels": None}),
    ({"drop_keys": ("label",)}, [OWN | {"label": 1, "labels": [1, 2]}], {"labels": [[-100, 2]]}),
    *(
        ({}, [ABC[2] | {key: MASK} | more], {"labels": [wanted], key: [MASK]})
        for key in ("completion_mask", "assistant_masks")
        for more, wanted in (({}, [-100, -100, 8, 9]), ({"labels": [1, 2, 3, 4]}, [-100, 2, 3, 4]))
    ),
    # What is too long.
    (CUT, ABC, {"input_ids": [[1, 2, 3], [4, 5, 0], [6, 7, 8]]}),
    (CUT, [ROW | {"labels": [7, 8]}], {"input_ids": [[1, 2, 3]], "labels": [7]}),
    (
        {"max_length": 3},
        [{"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}],
        {"input_ids": [[1, 2, 3]]},
    ),
    # Keys per token, and text.
    (
        {"pad_to_multiple_of": 4},
        [
            {**TOKENS, "input_ids": [1, 2], "special_tokens_mask": [1, 0], "shift_labels": [1, 0]},
            {"input_ids": [3], "weight": [2], "box": [[5, 6]], "flag": np.array([True])}
            | {"special_tokens_mask": [0], "shift_labels": [0]},
        ],
        {
            "weight": [[0.5, 1.5, 2.0, 0.0]],
            "box": [[[1, 2], [3, 4], [5, 6], [0, 0]]],
            "flag": [[True, False, True, False]],
            "special_tokens_mask": [[1, 0, 0, 1]],  # padding is special
            "shift_labels": [[1, 0, 0, -100]],  # and no target
        },
    ),
    ({}, [OWN | TEXT], dict.fromkeys(TEXT)),
    # What only has the name of an image.
    (
        {},
        [OWN | {"image": "cat.png", "image_path": ["a", "b", "c"], "image_mask": [0, 1]}] * 2,
        {"image_mask": [[0, 1, 0, 1]], "image": None, "image_path": None},
    ),
    ({}, [{"input_ids": [[1, 2, 3]], "image_mask": [[0, 1, 0]]}], {"image_mask": [[0, 1, 0]]}),
    # Numbers of patches (Molmo2's, counted over all images of a processor's call) go on; less than
    # 0 is none.
    (
        {},
        [
            ABC[1] | PATCHES,
            {"input_ids": [3]},
            ABC[1] | ONE_PATCH | {"image_token_pooling": [[2, 3], [0, -1]]},
        ],
        {"image_token_pooling": [[0, 1], [7, -1], [10, 11], [8, -1]]},
    ),
    # as many numbers as tokens
    ({}, [ABC[1] | PATCHES], {"image_token_pooling": [[0, 1], [7, -1]]}),
]


@pytest.mark.parametrize(("options", "examples", "wanted"), COLLATED)
def test_batches_hold_what_examples_say(options, examples, wanted):
    """In numbers of the same kind; `None` stands for what a batch does not have."""
    batch = PackingCollator(**options)(examples)
    found = {name: batch[name].tolist() if name in batch else None for name in wanted}
    assert repr(found) == repr(wanted)


OTHER = {
    "position_ids": [0, 1, 0, 1, 2],
    "seq_idx": [3, 3, 4, 4, 4],
    "attention_mask": [1, 1, 2, 2, 2],
    "seq_lengths": [2, 3],
}
WEIGHED = OWN | {"weight": [1.0, 1.0]}
REFUSED = [
    *(
        ({}, [ABC[0], {"input_ids": [1, 2, 3, 4, 5], first: PACKED[first], second: OTHER[second]}],
         ["example 1", first, second, "[0, 3]", "[0, 2]"])
        for first in PACKED for second in PACKED if first < second
    ),
    ({}, [ROW | {"label": 7}], ["example 0, 'label'", "2 document(s)"]),
    ({}, [ROW | {"input_ids": [1, 2, 3, 4]}], ["was the row cut? TRL's SFTConfig"]),
    # Positions that run on into the next document.
    ({}, [ABC[0], {"input_ids": [1, 2], "position_ids": [3, 4]}], ["'position_ids'", "end at 2", "drop_keys"]),
    ({"first_position": 2, "pad_to_multiple_of": 4}, [OWN], ["example 0", "end at 1", "starts at 2"]),
    # Keys that only some examples have.
    ({}, [WEIGHED, OWN], ["example 1, 'weight'", "example 0 has it"]),
    ({}, [WEIGHED, {"input_ids": [1], "position_ids": [0], "weight": [[1.0, 2.0]]}], ["1, 'weight'", "(2,)", "()"]),
    # Weights of losses.
    *(
        ({"loss_weights": "document"}, [{"input_ids": [1, 2, 3], **change}], [words])
        for change, words in (
            ({"document_weight": -1.0}, "at least 0"), ({"document_weight": float("nan")}, "finite"),
            ({"document_weight": [1.0, 2.0]}, "document"), ({"loss_weights": [1.0] * 3}, "beside"),
            ({"labels": 1}, "labels"),
        )
    ),
    ({"loss_weights": "document"}, [OWN | {"document_weight": 1.0}, OWN], ["not found, but example 0 has it"]),
    ({"labels": "unshifted"}, ABC, ["example 0, 'labels': not found", "labels='none'"]),
    ({}, [OWN | {"label": 1, "labels": [1]}], ["example 0", "'label'", "'labels'", "drop_keys"]),
    ({"max_length": 3}, ABC, ["example 2, 'input_ids'", "4 tokens", "max_length=3", "overflow='truncate'"]),
    ({"max_length": 8, "rows": 1}, ABC, ["3 documents of 9 tokens take 2 rows of 8"]),
    ({"max_length": 8, "max_documents": 1}, [ROW], ["found 2 documents for rows of at most 1; raise max_documents"]),
    ({}, [OWN | {"image_id": 7}], ["'image_id': found shape ()"]),
    ({}, [ABC[1] | PATCHES, {"input_ids": [3], "image_token_pooling": [[0, 1]]}],
     ["example 1, 'image_token_pooling': it numbers the patches of 'pixel_values'"]),
    # What is no batch.
    ({}, [], ["empty batch"]),
    ({}, {"input_ids": [[1]]}, ["found dict", "list of dicts"]),
    ({}, [ABC[0], [1, 2]], ["example 1", "found list"]),
    ({}, [ABC[0], {"text": "a", "ids": [1]}], ["example 1", "'input_ids'", "['ids', 'text']", "tokenize"]),
    ({}, [{"input_ids": None}], ["example 0", "'input_ids'"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "examples", "parts"), REFUSED)
def test_batches_that_are_refused(options, examples, parts):
    refused(examples, *parts, **options)


# Other keys


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("scores", np.zeros((3, 4, 4)), "(3, 4, 4)"),
        ("length", [2], "(1,)"),
        ("word_ids", [None, 0], "object"),
        ("complex", np.zeros(2, complex), "complex128"),
        ("attention_mask", [0, 0, 0], "one token or more"),
        ("attention_mask", [1, 0, 1], "token 1"),
        ("attention_mask", [1, 1], "shape (2,)"),
        ("attention_mask", [0.0, float("-inf"), 0.0], "-inf"),
        ("position_ids", [0, 1, 7], "jump from 1 to 7"),
        ("position_ids", [0, 1, -1], "-1"),
        ("position_ids", [0.0, 1.0, 2.0], "float32"),
        ("position_ids", [[0, 1, 2]] * 3, "shape (3, 3)"),
        ("input_ids", [], "no tokens"),
        ("input_ids", torch.zeros(1, 0), "no tokens"),
        ("input_ids", [1.0, 2.0], "float32"),
        ("input_ids", np.array([True]), "bool"),
        ("input_ids", [1, -100], "from -100"),
        ("input_ids", [[1, 2], [3, 4]], "(2, 2)"),
        ("input_ids", "a b", "<U3"),
        ("input_ids", [1, 2**63], "int too big"),
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
