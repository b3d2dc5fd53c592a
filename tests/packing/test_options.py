"""Options that are out of range, unknown, or contradict each other are refused by name, whoever is
given them.

What each is given, and what is said of it, stands in options.json."""

import json
from pathlib import Path

import datasets
import pytest

from autopack import InvalidPacking, PackedBatchSampler, PackingCollator, pack
from autopack.packing import CostModel, plan

TABLES = json.loads(Path(__file__).with_name("options.json").read_text())
CALLS = {"plan": plan, "sampler": PackedBatchSampler, "collator": PackingCollator, "pack": pack}
STREAM = datasets.Dataset.from_list([{"input_ids": [1]}]).to_iterable_dataset()
REFUSED = [(name, *row) for name, table in TABLES.items() for row in table["refused"]]
REFUSED += [
    ("plan", {"strategy": "sequential", "cost": CostModel()}, "has an order"),
    ("pack", {"dataset": STREAM, "strategy": "best"}, "strategy='best'"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_bad_options_are_named(name, options, message):
    with pytest.raises((ValueError, InvalidPacking), match=message):
        CALLS[name](**TABLES[name]["plain"] | options)


@pytest.mark.parametrize("name", CALLS)
def test_without_them_nothing_is_refused(name):
    CALLS[name](**TABLES[name]["plain"])
