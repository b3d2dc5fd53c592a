"""Results: how what a release gave is recorded, and the tables that are made of the records."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat import matrix
from compat.common import write_json
from compat.matrix import MATRIX, MODES, Matrix, Release
from compat.words import Cell, cell_of, status_of, word_of

BAD = ("LEAK", "crash")
COLUMNS = {"exact": "exact", "refused": "refused", "LEAK": "leaking", "crash": "crashing"}
"""What the table counts, by status; the rest is upstream's: stock raises, or no tiny model can be
made."""
LEFT_OUT = {"padded left": "padded", "no packed labels": "labels"}
"""Columns for exact cells of which a part is not served."""

Result = dict[str, Any]
"""What is recorded of a release."""


def table_path() -> Path:
    """Where the generated page is."""
    return matrix.RESULTS / "README.md"


def path_of(release: Release) -> Path:
    """Where the result of a release is recorded."""
    return matrix.RESULTS / "releases" / f"{release.transformers}.json"


def compact(release: Release, about: Mapping[str, Any], cells: Iterable[Cell]) -> Result:
    """What is recorded of cells that were measured.

    Of a release that autopack refuses, or that crashes, it is the reason, beside the packages.
    """
    packages = {
        name: about[name]
        for name in ("python", "torch", "tokenizers", "huggingface-hub")
        if name in about
    }
    wrong = {name: about[name] for name in ("refused", "crash") if name in about}
    result = {"transformers": release.transformers, "with": packages, **wrong}
    return {**result, **_compacted(cells)} if "types" in about else result


def _compacted(cells: Iterable[Cell], worst: float = 0.0) -> Result:
    """A line per model type with a word per mode; reasons once, under the numbers that words
    name."""
    cells = sorted(cells, key=lambda cell: (cell["task"], cell["type"]))
    modes = sorted({cell["mode"] for cell in cells}, key=MODES.index)
    reasons: dict[str, str] = {}
    tasks: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        words = tasks.setdefault(cell["task"], {}).setdefault(cell["type"], [""] * len(modes))
        words[modes.index(cell["mode"])] = word_of(cell, reasons)
    return {
        "worst error": max([worst, *(cell["worst"] for cell in cells if "worst" in cell)]),
        "modes": modes,
        "cells": tasks,
        "reasons": dict(sorted(reasons.items())),
    }


def cells_of(result: Result) -> list[Cell]:
    """The cells that a result holds, as they were measured but for their single worst errors."""
    return [
        {
            "task": task,
            "type": name,
            "mode": mode,
            **cell_of(word, result["reasons"]),
        }
        for task, types in result.get("cells", {}).items()
        for name, words in types.items()
        for mode, word in zip(result["modes"], words, strict=True)
        if word
    ]


def counts(result: Result, task: str | None = None) -> Counter[str]:
    """How many cells of a result, or of one of its tasks, have each status."""
    tasks = result.get("cells", {})
    chosen = tasks.values() if task is None else [tasks.get(task, {})]
    return Counter(
        status_of(word) for types in chosen for words in types.values() for word in words if word
    )


def grouped(result: Result, statuses: Iterable[str]) -> dict[tuple[str, str], str]:
    """The names of cells that have one of some statuses, by that and by their reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells_of(result):
        if cell["status"] in statuses:
            names = found.setdefault((cell["status"], cell["reason"]), [])
            names.append(f"{cell['type']}/{cell['task']}/{cell['mode']}")
    return {said: ", ".join(names) for said, names in found.items()}


def bad(result: Result) -> list[str]:
    """A line for every kind of leak and crash of a result: the reason, and the cells that have
    it."""
    found = [
        f"{status}: {cells}: {reason}" for (status, reason), cells in grouped(result, BAD).items()
    ]
    found += [f"crash: {result['crash']}"] if "crash" in result else []
    return found + [
        f"scenario {name}: {said}"
        for name, said in result.get("scenarios", {}).get("failed", {}).items()
    ]


def load_results(matrix: Matrix) -> dict[str, Result]:
    """The recorded results of the listed releases, by release; those without one are left out."""
    return {release.transformers: found for release in matrix.releases if (found := load(release))}


def load(release: Release) -> Result:
    """What is recorded of a release; nothing where it has not been run."""
    path = path_of(release)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def merged(release: Release, result: Result) -> Result:
    """A result of some cells, or of the scenarios, laid over what is recorded of the release."""
    earlier = load(release)
    if "cells" not in result or "cells" not in earlier:
        return {**earlier, **result}
    cells = {
        (cell["task"], cell["type"], cell["mode"]): cell
        for each in (earlier, result)
        for cell in cells_of(each)
    }
    worst = max(earlier["worst error"], result["worst error"])
    return {**earlier, **result, **_compacted(cells.values(), worst)}


def record(release: Release, result: Result) -> None:
    """Write the result of a release; scenarios that were recorded earlier stay."""
    earlier = load(release)
    whole = {**({"scenarios": earlier["scenarios"]} if "scenarios" in earlier else {}), **result}
    last = {name: whole.pop(name) for name in ("scenarios", "reasons") if name in whole}
    write_json(path_of(release), {**whole, **last}, depth=3)


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown, header first."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"|{'---|' * len(rows[0])}", *rest]


def counts_rows(
    tasks: Sequence[str], results: Mapping[str, Result], names: Iterable[str]
) -> list[list[str]]:
    """The rows of the table, header first: one per release, with four counts per task and what is
    known of all."""
    rows = [
        [
            "transformers",
            *tasks,
            "all",
            "exact of what stock runs",
            *LEFT_OUT,
            "other",
            "scenarios",
        ]
    ]
    for name in names:
        result = results.get(name, {})
        if "cells" not in result:
            said = next((word for word in ("refused", "crash") if word in result), "not run yet")
            rows.append([name, *[said] * (len(tasks) + 1), *[""] * (len(LEFT_OUT) + 2)])
        else:
            rows.append(
                [name, *(numbers(counts(result, task)) for task in tasks), *of_all([result])]
            )
        rows[-1].append(_scenarios(result))
    return rows


def share(found: Counter[str]) -> str:
    """The share of exact cells among those that stock runs, which never says more than there is:
    100 % is all."""
    percent = 100 * found["exact"] / max(1, sum(found[status] for status in COLUMNS))
    return f"{int(10 * percent) / 10:g} %"


def of_all(results: Sequence[Result]) -> list[str]:
    """The columns behind those of tasks, but for scenarios."""
    found: Counter[str] = sum(map(counts, results), Counter())
    cells = [cell for result in results for cell in cells_of(result) if cell["status"] == "exact"]
    without = [str(sum(name in cell for cell in cells)) for name in LEFT_OUT.values()]
    other = str(found["upstream error"] + found["unbuildable"])
    return [numbers(found), share(found), *without, other]


def numbers(found: Counter[str]) -> str:
    """The four counts."""
    return " / ".join(str(found[status]) for status in COLUMNS)


def _scenarios(result: Result) -> str:
    if "scenarios" not in result:
        return ""
    found = result["scenarios"]
    failed = len(found["failed"])
    return f"{found['passed']} passed" + (f", {failed} FAILED" if failed else "")


def markdown(matrix: Matrix, results: Mapping[str, Result]) -> str:
    """The generated compat/results/README.md."""
    rows = counts_rows(matrix.tasks, results, [release.transformers for release in matrix.releases])
    per_task = [
        numbers(sum((counts(result, task) for result in results.values()), Counter()))
        for task in matrix.tasks
    ]
    rows.append(["**all**", *per_task, *of_all(list(results.values())), ""])
    lines = [
        "<!-- Generated by `python -m compat.run`; do not edit. -->",
        "# Tested releases",
        "",
        textwrap.fill(_about(matrix).strip(), 120, break_on_hyphens=False),
        "",
        *markdown_table(rows),
    ]
    if wrong := [
        f"* transformers {name}: {line}" for name, result in results.items() for line in bad(result)
    ]:
        lines += ["", "## Leaks and crashes", "", *wrong]
    return "\n".join(lines) + "\n"


def _about(matrix: Matrix) -> str:
    modes, counted = ", ".join(matrix.modes), " / ".join(COLUMNS.values())
    return f"""
Every minor release of transformers at its last patch, torch {matrix.torch}, CPU, float32, tiny random models: every
model type that the release has, with {modes} as far as its class declares them (flash and flex by stand-ins of the
kernels' signatures). A cell is a type with one of these, as `autopack.enable(model)` without another word serves it.
Counted are cells that are {counted}; then exact cells whose padded batches stay as they came or whose packed rows take
no labels; *other* are cells in which stock itself raises on one document, or of which no tiny model can be made.
[releases](releases) has every cell, with reasons."""


def stale(matrix: Matrix) -> tuple[list[str], list[str]]:
    """What contradicts the matrix among the recorded results and the generated page, and what has
    no record yet."""
    results = load_results(matrix)
    wrong, missing = [], []
    for release in matrix.releases:
        name = release.transformers
        result = results.get(name, {})
        if not {"cells", "refused", "crash"} & set(result):
            missing.append(name)
            continue
        pins = {
            "torch": matrix.torch,
            "tokenizers": release.tokenizers,
            "huggingface-hub": release.hub,
        }
        found = {package: result["with"].get(package, "").partition("+")[0] for package in pins}
        if found != pins:
            wrong.append(
                f"transformers {name} was recorded with other packages than {MATRIX.name} pins: "
                f"{found}."
            )
        if "cells" in result:
            lacking = [task for task in matrix.tasks if task not in result["cells"]]
            if lacking or result["modes"] != list(matrix.modes):
                wrong.append(
                    f"transformers {name} was recorded with other tasks or modes than "
                    f"{MATRIX.name} has."
                )
        wrong += [f"transformers {name} was recorded with {line}" for line in bad(result)]
    listed = {path_of(release) for release in matrix.releases}
    there = path_of(matrix.releases[0]).parent.glob("*.json")
    wrong += [f"{path.name} belongs to no listed release." for path in there if path not in listed]
    if not table_path().is_file() or table_path().read_text(encoding="utf-8") != markdown(
        matrix, results
    ):
        wrong.append(f"{table_path().name} is not what the matrix and the recorded results give.")
    return wrong, missing
