"""The scenarios of a release: tests/compat/test_exact.py and test_scenarios.py, run by pytest
inside it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from compat.environments import Environment
from compat.matrix import ROOT, CompatError

FILES = tuple(
    str(Path("tests") / "compat" / name) for name in ("test_exact.py", "test_scenarios.py")
)
TYPES_VARIABLE = "AUTOPACK_COMPAT_TYPES"
"""The tests read their model types from it; the matrix stays the only list."""

_NOT_PASSED = {"skipped": "skipped", "failure": "failed", "error": "failed"}
"""What becomes of a test, by the elements of a report."""


def run(environment: Environment, types: Sequence[str], limit: float) -> dict[str, Any]:
    """Run the scenarios of some model types in a release; returns what is recorded of them."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = f"-q -p no:cacheprovider -p no:xdist --junitxml={report} --rootdir={ROOT}"
        command = [sys.executable, "-m", "pytest", *FILES, *options.split()]
        environ = {
            **environment.environ(),
            TYPES_VARIABLE: ",".join(types),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompatError(
                f"the scenarios took longer than {limit:.0f} s; allow more with --limit."
            ) from error
        found = by_outcome(report.read_text() if report.is_file() else "<none/>")
    log = environment.log.with_name(f"{environment.name}.scenarios.log")
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode and not found["failed"]:
        found["failed"]["pytest"] = f"ended with status {done.returncode}; see {log.name}"
    return found


def by_outcome(report: str) -> dict[str, Any]:
    """How many tests passed in a report of pytest's, which were skipped and which failed, each with
    the reason."""
    found: dict[str, Any] = {"passed": 0, "skipped": {}, "failed": {}}
    for test in ElementTree.fromstring(report).iter("testcase"):
        wrong = next((each for each in test if each.tag in _NOT_PASSED), None)
        if wrong is None:
            found["passed"] += 1
        else:
            said = wrong.get("message", "").partition("\n")[0][:240]
            found[_NOT_PASSED[wrong.tag]].setdefault(test.get("name"), said)
    return found
