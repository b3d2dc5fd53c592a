"""The scenarios of a release: tests/compat/test_exact.py and test_scenarios.py, run by pytest
inside it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
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
        report = Path(scratch) / "report.xml"
        options = "-m pytest -q -p no:cacheprovider -p no:xdist -o junit_family=xunit1"
        command = [sys.executable, *options.split(), *FILES, f"--junitxml={report}"]
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
        found = parse_report(
            report.read_text(encoding="utf-8") if report.is_file() else "<testsuites/>"
        )
    log = environment.log.with_name(f"{environment.name}.scenarios.log")
    log.write_text(done.stdout, encoding="utf-8")
    if done.returncode and not found["failed"]:
        found["failed"]["pytest"] = f"ended with status {done.returncode}; see {log.name}"
    return found


def parse_report(xml: str) -> dict[str, Any]:
    """What pytest's junit report says: how many passed, which were skipped and which failed, each
    with the reason."""
    found: dict[str, dict[str, str]] = {"skipped": {}, "failed": {}}
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    for case in cases:
        for part in case:
            if part.tag in kinds:
                of_kind = found[kinds[part.tag]]
                of_kind.setdefault(case.get("name", "?"), _first_line(part))
    passed = len(cases) - len(found["failed"].keys() | found["skipped"].keys())
    return {"passed": passed, **found}


def _first_line(found: ElementTree.Element) -> str:
    return next(iter((found.get("message") or "").strip().splitlines()), "")[:240]
