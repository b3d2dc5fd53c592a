"""What is said of the packing that a trainer of TRL does by itself."""

import logging

import pytest

import autopack
from tests.auditing.test_trainers import sft

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def said(caplog):
    """What autopack has said."""
    caplog.set_level(logging.WARNING, "autopack")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("autopack")
    ]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("strategy", "settings", "cut"),
    [
        ("bfd", {}, False),
        ("bfd_split", {}, False),
        ("wrapped", {}, True),
        ("wrapped", {"packing": False}, False),
    ],
)
def test_packing_of_trl(said, strategy, settings, cut, whole):
    """Documents that it cuts are said to be lost, once; others are checked, and nothing is said."""
    steps = {"max_steps": 4, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    settings = {"packing": True, **settings}
    run = sft(packing_strategy=strategy, max_length=32, **steps, **settings)
    with autopack.enable(run if whole else run.model) as handle:
        run.train()
        shown = repr(handle)
    assert ["packing_strategy='wrapped'" in line for line in said()] == [True] * cut
    assert ("packing_strategy='wrapped'" in shown) == (cut and whole)
    assert "skipped" not in shown
    assert strategy == "wrapped" or "checks in 4 calls, worst" in shown
