"""Run the tests that attack autopack as users might without meaning to, and record by kind what came of them.

    python -m compat.attacks                                        print a line for each kind
    python -m compat.attacks --json compat/results/attacks.json     record them, for docs/reliability.md

Each case is a model, a call or a change that somebody may make. It passes where the result is exact, or where autopack
refuses with the error that the test names; most have a control that shows what is wrong without autopack's answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from compat.matrix import ROOT
from compat.reliability import packages

KINDS: dict[str, tuple[str, ...]] = {
    "measured code that is not whole: types of weights, functions on instances, patched functions, hooks, own code "
    "that changes later": ("tests/inspection/test_followed.py", "tests/inspection/test_whole_objects.py"),
    "code that mixes tokens beyond what its proof has run: lengths, counts, tokens, arguments, modes": (
        "tests/watching/test_envelope.py",
        "tests/watching/test_modes.py",
        "tests/watching/test_watched_calls.py",
        "tests/auditing/test_branches_by_chance.py",
    ),
    "outputs beside logits: whole numbers, lists, objects, numbers of a call": (
        "tests/auditing/test_other_outputs.py",
    ),
    "padding that is read": ("tests/calls/test_padding_read.py", "tests/calls/test_padding_beside_labels.py"),
    "tokens of padding inside documents, and positions that do not begin at 0": (
        "tests/calls/test_first_positions.py",
    ),
    "subclasses, replaced parts, patched code, losses, configurations, environments": ("tests/unfamiliar",),
    "layers of somebody else's in a known model": ("tests/proving",),
    "hooks and wrappers around models and layers": (
        "tests/inspection/test_onlookers.py",
        "tests/enabling/test_wrapping.py",
    ),
    "copies, pickles, several models and threads": (
        "tests/runtime/test_copies.py",
        "tests/runtime/test_copies_of_parts.py",
        "tests/enabling/test_several_models.py",
        "tests/runtime/test_lifetime.py",
    ),
    "errors and interrupts in the middle of a call or of enabling": (
        "tests/runtime/test_interrupts.py",
        "tests/enabling/test_drift.py",
    ),
    "values of a batch that change after they were moved": ("tests/runtime/test_host_reads.py",),
}


def run(paths: tuple[str, ...]) -> dict[str, Any]:
    """Run tests, those that are left out of a usual run too: how many passed, failed and were skipped, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--all", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts: Counter[str] = Counter(map(_outcome, cases))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _outcome(case) == "failed"]
    return {"paths": list(paths), "counts": dict(counts), "failed": failed}


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "known to fail" if skipped.get("type") == "pytest.xfail" else "skipped"


def main(arguments: list[str] | None = None) -> int:
    """Run all kinds; returns 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    path = parser.parse_args(arguments).json
    found = {}
    for kind, paths in KINDS.items():
        found[kind] = run(paths)
        print(f"{kind}: {', '.join(f'{count} {what}' for what, count in found[kind]['counts'].items())}", flush=True)
    if path is not None:
        path.write_text(json.dumps({"with": packages(), "kinds": found}, indent=1) + "\n", encoding="utf-8")
    return int(any(each["failed"] for each in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
