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
    with the reason.

    The tests record the properties `check`, `model` and `mode`; a failure without them (of a
    collection) has a name."""
    passed, skipped, failed = 0, {}, {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        parts = [properties.get(name, "") for name in ("check", "model", "mode")]
        name = " ".join(filter(None, parts)) or case.get("name", "?")
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                failed[name] = _first_line(found)
                break
        else:
            if (found := case.find("skipped")) is not None:
                skipped[name] = _first_line(found)
            else:
                passed += 1
    return {
        "passed": passed,
        "skipped": dict(sorted(skipped.items())),
        "failed": dict(sorted(failed.items())),
    }


def _first_line(found: ElementTree.Element) -> str:
    return next(iter((found.get("message") or "").strip().splitlines()), "")[:240]
