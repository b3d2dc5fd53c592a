"""Other people's programs: what is recorded of them, and the page of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from compat.programs import __main__ as programs

RECORDED = programs.recorded()


def test_the_page_says_what_is_recorded():
    assert programs.PAGE.read_text() == programs.page(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_every_run_that_stock_makes_gives_its_numbers(name):
    for run, found in RECORDED[name]["runs"].items():
        assert found["verdict"] in ("exact", "apart", "no stock"), run
        if found["verdict"] == "exact":
            assert found["worst"] <= 1e-5, run


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_are_the_runs_of_the_program(name):
    program, runs = importlib.import_module(f"compat.programs.{name}"), RECORDED[name]["runs"]
    assert list(runs) == list(program.RUNS)
    assert {run for run, found in runs.items() if found["verdict"] == "apart"} <= set(program.APART)


def test_all_programs_are_recorded():
    assert set(RECORDED) == {file.stem for file in Path(programs.__file__).parent.glob("[!_]*.py")}


def test_what_llamafactory_pads_gains():
    runs = RECORDED["llamafactory"]["runs"]
    padded = [found for run, found in runs.items() if "packing" not in run and not run.startswith("pt")]
    assert all(found["padding skipped"] > 20 for found in padded)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("transformers_trainer", "token classification"),
        ("torch_loop", "own head, mean of all columns"),
        ("trl_trainers", "DPO, LoRA"),
    ],
)
def test_a_run_still_has_the_verdict_that_is_recorded(name, run, tmp_path):
    program = importlib.import_module(f"compat.programs.{name}")
    found, known = programs.Runner(program, Path(sys.executable), tmp_path).compared(run), RECORDED[name]["runs"][run]
    assert found["verdict"] == known["verdict"]
    assert found["padding skipped"] == pytest.approx(known["padding skipped"], abs=5)
