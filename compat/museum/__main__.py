"""Show the auditor every exhibit of the museum, and record what it says.

    python -m compat.museum [NAME ...]    print a line for each exhibit, or for those named
    python -m compat.museum --record      also write compat/results/museum.json and the table of docs/leaks.md
    python -m docs.draw                   draw its picture, among others

It is wrong where a mistake is not found, a sound twin raises an alarm, or an enabled model is not
exact."""

from __future__ import annotations

from compat import study
from compat.museum import page
from compat.museum.exhibit import names
from compat.museum.measure import measured, objection
from compat.study import Study

STUDY = Study(
    "museum",
    str(__doc__),
    names,
    lambda chosen, _: ((name, measured(name)) for name in chosen),
    objection,
    pages=lambda cells: {
        page.PAGE: study.between(
            page.PAGE.read_text(encoding="utf-8"), *page.PLACE, lambda: page.part(cells)
        )
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
