"""Show the auditor every exhibit of the museum, and record what it says.

    python -m compat.museum [NAME ...]    print a line for each exhibit, or for those named
    python -m compat.museum --record      also write compat/results/museum.json and the table of docs/leaks.md
    python -m docs.draw                   draw its picture, among others

It is wrong where a mistake is not found, a sound twin raises an alarm, or an enabled model is not
exact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from compat import study
from compat.common import quietly
from compat.museum import page
from compat.museum.exhibit import names
from compat.museum.measure import Outcome, measured, objection
from compat.study import Study


def _of(name: str) -> Outcome:
    with quietly():
        return measured(name)


def _all(chosen: list[str], asked: Any) -> Iterator[tuple[str, Outcome]]:
    with ProcessPoolExecutor(asked.jobs) as pool:
        yield from zip(chosen, pool.map(_of, chosen), strict=True)


STUDY = Study(
    "museum",
    str(__doc__),
    names,
    _all,
    objection,
    options={"jobs": {"type": int, "default": 1, "help": "processes that run at a time"}},
    pages=lambda cells: {
        page.PAGE: study.between(
            page.PAGE.read_text(encoding="utf-8"), *page.PLACE, lambda: page.part(cells)
        )
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
