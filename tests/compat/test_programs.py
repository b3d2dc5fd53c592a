"""Other people's programs: what is recorded of them, and the page of it."""

import sys
from pathlib import Path

import pytest

from compat.programs import __main__ as programs
from compat.programs._drivers import programs as listed

_ALL = programs.recorded()
CUT = {name: found for name, found in _ALL.items() if name.endswith(".max_tokens")}
"""Runs whose optimizer steps `--max-tokens` cuts anew."""
RECORDED = {name: found for name, found in _ALL.items() if name not in CUT}
KEEPS_PADDING = {
    # They put virtual tokens before each row, or ask where in the row a prompt ends.
    "peft_methods": {"prompt tuning", "prefix tuning", "P-tuning", "activated LoRA"},
    # padding is read, or may be
    "torch_loop": {"own head, mean of all columns", "own head, frozen backbone"},
    # whose noise is that of the padded row
    "transformers_trainer": {"question answering", "causal LM, NEFTune"},
}
"""Runs that keep their padding."""
HAS_NONE = {
    "llamafactory": {"sft, full, neat packing", "pt, full", "sft, full, packing"},
    "transformers_trainer": {"causal LM, DataCollatorWithFlattening"},
    "trl_trainers": {"SFT, packing", "SFT, packing, wrapped", "SFT, padding-free"},
}
"""Runs whose batches have no padding."""
SERVED = {
    "llamafactory.max_tokens": {
        "sft, full",
        "sft, LoRA",
        "sft, full, gradient accumulation",
        "dpo, LoRA",
        "rm, LoRA",
    },
    "trl_trainers.max_tokens": {
        "SFT",
        "SFT, packing",
        "SFT, padding-free",
        "SFT, LoRA",
        "DPO",
        "DPO, LoRA",
        "reward",
    },
}
"""Runs whose steps are cut, and not left as they were."""


def test_the_page_says_what_is_recorded():
    assert programs.PAGE.read_text() == programs.page()


@pytest.mark.parametrize("name", _ALL)
def test_every_run_that_stock_makes_gives_its_numbers(name):
    """What differs by more than 1e-6 is rounding."""
    for run, found in _ALL[name].items():
        assert found["verdict"] in (
            "exact",
            "apart",
            "no stock",
            *(("not cut",) if name in CUT else ()),
        ), run
        if found["verdict"] in ("exact", "not cut"):
            assert found["worst"] <= 1e-6 or (
                found["worst"] <= 1e-5 and found["float64"] < 1e-12
            ), run


@pytest.mark.parametrize("name", CUT)
def test_steps_of_common_trainers_are_cut(name):
    runs = CUT[name]
    assert {run for run in SERVED[name] if runs[run]["verdict"] == "exact"} == SERVED[name]


@pytest.mark.parametrize("name", RECORDED)
def test_all_runs_of_a_program_are_recorded(name):
    program, runs = listed()[name], RECORDED[name]
    assert list(runs) == list(program["runs"])
    assert {run for run, found in runs.items() if found["verdict"] == "apart"} <= set(
        program.get("apart", ())
    )


def test_all_programs_are_recorded():
    assert set(RECORDED) == set(listed())
    modules = {
        program.get("module", name)
        for name, program in listed().items()
        if any("command" not in {**program, **told} for told in program["runs"].values())
    }
    assert {file.stem for file in Path(programs.__file__).parent.glob("[!_]*.py")} == modules


def _padded(name):
    """How much padding runs that stock makes have skipped, by the name of a run."""
    runs = RECORDED[name].items()
    return {
        run: found["padding skipped"]
        for run, found in runs
        if found["verdict"] in ("exact", "apart")
    }


@pytest.mark.parametrize("name", RECORDED)
def test_only_what_is_known_to_keep_its_padding_does(name):
    runs = _padded(name)
    kept = {run for run, skipped in runs.items() if not skipped} - HAS_NONE.get(name, set())
    assert kept == KEEPS_PADDING.get(name, set())


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
    found, known = (
        programs.Runner(name, Path(sys.executable), tmp_path).compared(run),
        RECORDED[name][run],
    )
    assert found["verdict"] == known["verdict"]
    assert found["padding skipped"] == pytest.approx(known["padding skipped"], abs=5)
