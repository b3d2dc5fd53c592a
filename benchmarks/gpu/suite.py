"""The tests of the CUDA backends, in a process of their own, as far as they come."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from typing import Any

from benchmarks.gpu.job import Job, LeftOut
from benchmarks.gpu.processes import run_bounded

_OUTCOME = r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
# alone `tests/gpu/test_x.py::test_y[z] PASSED [ 3%]`, with xdist `[gw0] [ 3%] PASSED tests/gpu/test_x.py::test_y[z]`
_LINES = (
    re.compile(rf"^(?P<test>tests/gpu/\S+::.+?) {_OUTCOME}(?: |$)"),
    re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_OUTCOME} (?P<test>tests/gpu/\S+::.+?)\s*$"),
)


def run_tests(job: Job) -> dict[str, Any]:
    """Run `tests/gpu` by pytest, and count what passed, failed or was not reached."""
    if importlib.util.find_spec("pytest") is None:
        raise LeftOut("pytest is not installed")
    target = "tests/gpu/test_varlen.py" if job.small else "tests/gpu"
    command = [sys.executable, "-m", "pytest", target, "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts="]
    if not job.small and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "4"]
    limit = max(job.left() - 5, 1.0)
    status, lines = run_bounded(command, limit)
    tests = outcomes(lines)
    counts = Counter(tests.values())
    failed = sorted(test for test, outcome in tests.items() if outcome in ("FAILED", "ERROR"))
    if failed:
        job.problem(f"{len(failed)} of {len(tests)} tests failed, the first is {failed[0]}")
    if status is None:
        job.problem(f"not finished after {limit:.0f} s; {len(tests)} tests had ended")
    elif status and not failed:
        job.problem(f"pytest ended with status {status}")
    if job.machine.is_cuda and not counts["PASSED"]:
        job.problem("no test passed")
    found = {"command": command[1:], "status": status, "counts": dict(counts), "failed": failed}
    return {**found, "output": lines[-80:] if failed or status else []}


def outcomes(lines: list[str]) -> dict[str, str]:
    """What pytest's verbose output says of each test."""
    matches = (pattern.match(line) for line in lines for pattern in _LINES)
    return {match["test"]: next(g for g in match.groups() if g != match["test"]) for match in matches if match}
