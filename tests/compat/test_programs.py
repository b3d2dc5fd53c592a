"""Other people's programs: what is recorded of them, and the page of it."""

from __future__ import annotations

import pytest

from compat.programs import __main__ as programs
from compat.programs import llamafactory

RECORDED = programs.recorded()


def test_the_page_says_what_is_recorded():
    assert programs.PAGE.read_text() == programs.page(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_every_run_that_stock_makes_gives_its_numbers(name):
    for run, found in RECORDED[name]["runs"].items():
        assert found["verdict"] in ("exact", "apart", "no stock"), run
        if found["verdict"] == "exact":
            assert found["worst"] <= 1e-5, run


def test_all_runs_of_llamafactory_are_recorded_and_what_is_padded_gains():
    runs = RECORDED["llamafactory"]["runs"]
    assert list(runs) == list(llamafactory.RUNS)
    assert {run for run, found in runs.items() if found["verdict"] == "apart"} <= llamafactory.APART
    padded = [found for run, found in runs.items() if "packing" not in run and not run.startswith("pt")]
    assert all(found["padding skipped"] > 20 for found in padded)
