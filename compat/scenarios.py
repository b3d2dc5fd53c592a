"""The scenarios of a release: tests/compat/test_exact.py and test_scenarios.py, run by pytest
inside it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compat.environments import Environment
from compat.matrix import ROOT, CompatError

FILES = tuple(
    str(Path("tests") / "compat" / name) for name in ("test_exact.py", "test_scenarios.py")
)
TYPES_VARIABLE = "AUTOPACK_COMPAT_TYPES"
"""The tests read their model types from it; the matrix stays the only list."""


def run(environment: Environment, types: Sequence[str], limit: float) -> dict[str, Any]:
    """Run the scenarios of some model types in a release; returns what is recorded of them."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "outcomes.json"
        options = "-m pytest -q -p compat.upstream_plugin -p no:cacheprovider -p no:xdist"
        command = [sys.executable, *options.split(), *FILES, f"--outcomes={report}"]
        command += ["--rootdir", str(ROOT)]
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
        found = by_outcome(json.loads(report.read_text()) if report.is_file() else {})
    log = environment.log.with_name(f"{environment.name}.scenarios.log")
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode and not found["failed"]:
        found["failed"]["pytest"] = f"ended with status {done.returncode}; see {log.name}"
    return found


def by_outcome(outcomes: dict[str, Any]) -> dict[str, Any]:
    """How many tests passed, which were skipped and which failed, each with the reason."""
    found: dict[str, dict[str, str]] = {"passed": {}, "skipped": {}, "failed": {}}
    for name, each in outcomes.items():
        said = each["why"].partition("\n")[0][:240]
        found[each["outcome"]].setdefault(name.rpartition("::")[2], said)
    return {**found, "passed": len(found["passed"])}
