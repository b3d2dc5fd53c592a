"""Break autopack on purpose, at one named function at a time, and see that its tests notice.

    python -m compat.seams --record           every seam of compat/seam_table
    python -m compat.seams flex scan:         the seams whose names contain one of these

The tests of all seams run once with wrappers that change nothing, and have to pass. Those of each
seam then run with its break, in a process of its own, and every one has to fail. Nothing on disk
changes. The exit status is 1 where a break survives, where a name is not found, and where tests
fail without a break.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compat import study
from compat.matrix import ROOT
from compat.seam_breaks import Seam
from compat.seam_table import SEAMS
from compat.seam_tests import BROKEN, home_of
from compat.study import Study, Verdict

_SECONDS = 900
"""Tests that take longer hang, which fails them."""


def _tested(seams: Sequence[Seam], table: str, root: Path, broken: bool) -> dict[str, bool]:
    """Which tests of seams ran in a process of their own, and whether they failed."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, ROOT)))}
    if broken:
        environ[BROKEN] = f"{table} {seams[0].name}"
    command = [sys.executable, "-m", "compat.seam_tests", table, *(seam.name for seam in seams)]
    limit = _SECONDS if broken else None
    try:
        done = subprocess.run(
            command, cwd=root, env=environ, capture_output=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {test: True for seam in seams for test in seam.tests}
    last = done.stdout.splitlines()[-1:]
    return json.loads(last[0]) if last and last[0].startswith(b"{") else {}


def run(
    seams: Sequence[Seam], jobs: int = 1, root: Path = ROOT, table: str = "compat.seam_table"
) -> Iterator[tuple[str, Verdict]]:
    """Try seams of a table, a module with `SEAMS`, `jobs` at a time; yield the name of each, its
    `status`, and `by` which test it is caught or why not."""
    with ThreadPoolExecutor(jobs) as pool:
        whole = pool.submit(_tested, seams, table, root, False)
        broken = [pool.submit(_tested, [seam], table, root, True) for seam in seams]
        unbroken = whole.result()
        for seam, future in zip(seams, broken, strict=True):
            failed = _of(seam, future.result())
            fails = _of(seam, unbroken)
            unfit = [test for test in seam.tests if fails[test] is not False]
            missed = [test for test in seam.tests if not failed[test]]
            if unfit:
                why = "does not pass without it" if fails[unfit[0]] else "does not run"
                found = {"status": "SURVIVES", "by": f"{unfit[0]} {why}"}
            elif missed:
                found = {"status": "SURVIVES", "by": f"SURVIVES {' '.join(missed)}"}
            else:
                found = {"status": "caught", "by": seam.tests[0]}
            yield seam.name, found


def _of(seam: Seam, found: dict[str, bool]) -> dict[str, bool | None]:
    """Whether any fails of what each test, class of tests or file of a seam stands for; None where
    none of it ran."""
    return {
        test: max(
            (bad for name, bad in found.items() if re.match(rf"{re.escape(test)}(\[|::|$)", name)),
            default=None,
        )
        for test in seam.tests
    }


def problems(seams: Iterable[Seam]) -> list[str]:
    """Return what is wrong with seams, in words: names that come twice, functions that are not
    found."""
    counts = Counter(seam.name for seam in seams)
    found = [f"{name}: there are several of this name" for name, n in counts.items() if n > 1]
    for seam in seams:
        try:
            home_of(seam.at)
        except (ImportError, AttributeError, LookupError) as error:
            found.append(f"{seam.name}: {error}")
        found += [] if seam.tests else [f"{seam.name}: it names no tests"]
    return found


def _measured(names: list[str], asked: Any) -> Iterator[tuple[str, Verdict]]:
    seams = [seam for seam in SEAMS if seam.name in names]
    if wrong := problems(seams):
        raise SystemExit("\n".join(wrong))
    yield from run(seams, asked.jobs)


STUDY = Study(
    "seams",
    str(__doc__),
    lambda: [seam.name for seam in SEAMS],
    _measured,
    options={"jobs": {"type": int, "default": 1, "help": "processes at the same time"}},
)

if __name__ == "__main__":
    sys.exit(study.main(STUDY))
