"""`autopack run --max-tokens` cuts the steps of a script that knows nothing of it, and never ends
one."""

import ast

import pytest

from tests.support.processes import python

SCRIPT = """
from tests.steps import steps_of

collate, task = {collate}
made = steps_of.trainer({model!r}, collate, task=task)
made.train()
print([each["loss"] for each in made.state.log_history if "loss" in each])
"""
TEXT = {"collate": "steps_of.texts, 'causal-lm'", "model": "llama"}
MASKED = {"collate": "steps_of.texts, 'masked-lm'", "model": "bert"}


def _losses(tmp_path, case, *options, status=0):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(**case))
    done = python("-m", "autopack", "run", *options, script, status=status)
    return [
        ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("[")
    ], done.stderr


def test_losses_are_those_of_the_script(tmp_path):
    (wanted,), before = _losses(tmp_path, TEXT)
    (found,), said = _losses(tmp_path, TEXT, "--max-tokens", "64")
    assert found == pytest.approx(wanted, rel=1e-5)
    assert " 24 calls" in before  # the control: four calls a step without it
    assert " 24 calls" not in said


def test_steps_that_cannot_be_cut_stay_as_they_are(tmp_path):
    (wanted,), _ = _losses(tmp_path, MASKED)
    (found,), said = _losses(tmp_path, MASKED, "--max-tokens", "64")
    assert found == wanted
    assert "[step-not-cut]" in said
    _, said = _losses(tmp_path, MASKED, "--max-tokens", "64", "--strict", status=1)
    assert "[step-not-cut]" in said
