"""Other people's programs: what is recorded of them, and the page of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from compat.programs import __main__ as programs

RECORDED = programs.recorded()
KEEPS_ITS_PADDING = {
    "adapters_": "its hooks on embeddings see the padded form",
    "opacus_": "its hooks on layers take the gradient of every row",
    "pylate_": "its texts are filled up with mask tokens, which losses may read",
    "span_marker_": "its model is called by other arguments than those of transformers",
}
"""Programs none of whose batches are packed, and why."""
KEEPS_PADDING: dict[str, set[str]] = {
    "deepspeed_": {"Llama, ZeRO-3", "BERT, ZeRO-3"},  # whose hooks gather parameters
    "flagembedding": set(),
    "flair_": {"text pairs"},  # one pair after the other, so that no batch has padding
    "gliner_": set(),
    "happytransformer_": {"question answering", "generation"},  # compares all columns of a row; fills its rows
    "ignite_": set(),
    "setfit_": set(),
    "simpletransformers_": {"question answering", "language model"},  # the same
    "skorch_": set(),
    "small_text_": set(),
    "spacy_transformers_": set(),
    "swift": set(),
    "textbrewer_": {"attention"},  # whose weights are wanted
}
"""Runs of other programs that keep their padding, or have none."""


def test_the_page_says_what_is_recorded():
    assert programs.PAGE.read_text() == programs.page(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_every_run_that_stock_makes_gives_its_numbers(name):
    for run, found in RECORDED[name]["runs"].items():
        assert found["verdict"] in ("exact", "apart", "no stock"), run
        if found["verdict"] == "exact":
            assert found["worst"] <= 1e-5, run


@pytest.mark.parametrize("name", RECORDED)
def test_all_runs_of_a_program_are_recorded(name):
    module: Any = importlib.import_module(f"compat.programs.{name}")
    runs = RECORDED[name]["runs"]
    assert list(runs) == list(module.RUNS)
    assert {run for run, found in runs.items() if found["verdict"] == "apart"} <= set(module.APART)
    assert RECORDED[name]["name"] == module.NAME


def test_all_programs_are_recorded():
    assert set(RECORDED) == {file.stem for file in Path(programs.__file__).parent.glob("[!_]*.py")}


@pytest.mark.parametrize("name", [*KEEPS_ITS_PADDING, *KEEPS_PADDING])
def test_only_what_is_known_to_keep_its_padding_does(name):
    runs = {run: found for run, found in RECORDED[name]["runs"].items() if found["verdict"] == "exact"}
    kept = {run for run, found in runs.items() if not found["padding skipped"]}
    assert kept == (set(runs) if name in KEEPS_ITS_PADDING else KEEPS_PADDING[name])


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
