"""Measure which neighbouring libraries an enabled model lives with: the real packages, on a tiny
random model.

    python -m compat.neighbours peft torchao   those whose name or what they do contains one of these
    python -m compat.neighbours --record      all of them, recorded, and docs/neighbours.md written

`pip install -e ".[neighbours]"` installs them. The verdicts are those of
compat/neighbours/measure.py: `LEAKS`, `other numbers` and `crash` are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

from compat import study
from compat.neighbours import adapters, quantised, table
from compat.neighbours.measure import BAD, CannotRun, Scenario, measure
from compat.study import Study, Verdict


def scenarios() -> dict[str, Scenario]:
    """Everything that is measured, in the order of the table."""
    every = *adapters.scenarios(), *quantised.scenarios()
    return {f"{each.neighbour}: {each.what}": each for each in every}


def _measured(names: list[str], _: Any) -> Iterator[tuple[str, Verdict]]:
    known = scenarios()
    for name in names:
        each = known[name]
        found: Verdict = {}
        for order in each.orders:
            try:
                found[order] = measure(each, order)
            except CannotRun as error:
                found[order] = {"cannot": str(error)}
        yield name, found


def wrong(_: str, cell: Verdict) -> str | None:
    """What breaks autopack's promise."""
    said = [
        f"enabled {order}: {form} {verdict['status']}"
        for order, verdicts in cell.items()
        for form in ("packed", "padded")
        if (verdict := verdicts.get(form)) and verdict["status"] in BAD
    ]
    return "; ".join(said)


def _versions() -> dict[str, str]:
    names = dict.fromkeys(each.neighbour for each in scenarios().values())
    installed = {
        each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()
    }
    return {
        name: installed.get(name, "not installed") for name in ("torch", "transformers", *names)
    }


STUDY = Study(
    "neighbours",
    str(__doc__),
    scenarios,
    _measured,
    wrong,
    _versions,
    pages=lambda cells: {table.PAGE: table.page(cells, scenarios())},
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
