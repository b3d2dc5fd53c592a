"""Options that are out of range, unknown, or contradict each other are refused by name, whoever is
given them."""

import datasets
import pytest

from autopack import InvalidPacking, PackedBatchSampler, PackingCollator, pack
from autopack.packing import CostModel, plan

EXAMPLES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
STREAM = datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset()
GROUPS = {"lengths": [7, 8, 9], "max_length": 20, "groups": [0, 0, 1]}
PLAN = {"lengths": [3, 1], "max_length": 8}

REFUSED = {
    "plan": (
        PLAN,
        [
            ({"max_length": 0}, "max_length=0: wanted an int of at least 1"),
            ({"max_length": 2**40}, "max_length=1099511627776: wanted at most 2,147,483,647"),
            ({"strategy": "bfd"}, "strategy='bfd': wanted one of 'best_fit', 'sequential'"),
            ({"overflow": "wrap"}, "overflow='wrap': wanted one of 'error', 'truncate'"),
            ({"seed": -1}, "seed=-1"),
            ({"max_documents": 0}, "max_documents=0"),
            ({"ranks": True}, "ranks=True"),
            ({"cost": 1.0}, "cost=1.0: wanted an autopack.packing.CostModel"),
            ({"strategy": "sequential", "cost": CostModel()}, "has an order"),
            ({"prefixes": [1, 1]}, "pass groups=, too"),
            (GROUPS | {"groups": [0, 0]}, "groups: wanted 3 ints, one per document; found 2"),
            (GROUPS | {"groups": [0, 0, -2]}, r"groups\[2\] is -2: wanted at least -1"),
            (
                GROUPS | {"groups": ["a", "b", "a"]},
                r"groups\[0\] is 'a': wanted an int",
            ),
            (GROUPS | {"groups": 3}, "groups: wanted one int per document, found what is no array"),
            (
                GROUPS | {"groups": [0, 0, 2**63]},
                r"groups\[2\] is 9223372036854775808: wanted 64 bits",
            ),
            (
                GROUPS | {"prefixes": [3, 3, 99]},
                r"prefixes\[2\] is 99: wanted at most the tokens of its document",
            ),
            (GROUPS | {"overflow": "split"}, "leave max_documents= and overflow='split' out"),
        ],
    ),
    "sampler": (
        PLAN,
        [
            ({"overflow": "split"}, "overflow='split' cuts documents"),
            (
                {"lengths": [90, 70], "overflow": "drop"},
                "no document is left of 2: all are longer than max_length; raise it",
            ),
            ({"rows_per_batch": 0}, "rows_per_batch=0"),
            ({"cost": "quadratic"}, "cost='quadratic': wanted an autopack.packing.CostModel"),
            ({"num_replicas": 2}, "wanted both or neither"),
            ({"num_replicas": 2, "rank": 2}, "rank=2: wanted an int below num_replicas=2"),
        ],
    ),
    "collator": (
        {},
        [
            ({"labels": "yes"}, "labels='yes'"),
            ({"overflow": "drop"}, "overflow='drop'"),
            ({"declare": ("segments",)}, "declare='segments': wanted one of"),
            ({"declare": "seq_idx"}, "declare='seq_idx': wanted several"),
            ({"max_length": 0}, "max_length=0"),
            ({"pad_to_multiple_of": 1.5}, "pad_to_multiple_of=1.5"),
            ({"first_position": -1}, "first_position=-1"),
            ({"drop_keys": "text"}, "drop_keys='text'"),
            ({"max_length": 10, "pad_to_multiple_of": 4}, "multiple"),
            ({"rows": 2}, "rows=2: is of rows of max_length, which is missing"),
            ({"max_documents": 2}, "max_documents=2: is of rows of max_length, which is missing"),
        ],
    ),
    "pack": (
        {"dataset": EXAMPLES, "max_length": 8},
        [
            ({"first_position": -1}, "first_position=-1"),
            ({"buffer_size": 0}, "buffer_size=0"),
            ({"drop_columns": "pair"}, "drop_columns='pair': wanted several"),
            ({"groups": "other"}, "groups: found no column 'other'"),
            ({"groups": "input_ids"}, "groups: column 'input_ids' holds list"),
            ({"groups": 3}, "groups=3: wanted the name of a column, True or False"),
            ({"dataset": STREAM, "strategy": "best"}, "strategy='best'"),
        ],
    ),
}
CALLS = {"plan": plan, "sampler": PackedBatchSampler, "collator": PackingCollator, "pack": pack}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (name, plain | changed, message)
        for name, (plain, rows) in REFUSED.items()
        for changed, message in rows
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises((ValueError, InvalidPacking), match=message):
        CALLS[name](**options)


@pytest.mark.parametrize("name", REFUSED)
def test_without_them_nothing_is_refused(name):
    CALLS[name](**REFUSED[name][0])
