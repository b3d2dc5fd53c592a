"""Results: how what a release gave is recorded, and the tables that are made of the records."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.matrix import COMPAT, MATRIX, MODES, ROOT, Matrix, Release
from compat.words import SOURCES, Cell, cell_of, source_of, status_of, usual_source, word_of

RESULTS = COMPAT / "results" / "releases"
TABLE = COMPAT / "results" / "README.md"
COLUMNS = {"exact": "exact", "refused": "refused", "LEAK": "leaking", "crash": "crashing"}
"""What the table counts, by status; the rest is upstream's: stock raises, or no tiny model can be made."""

PROVEN = {"record": "recorded", "twin": "twin", "parts": "parts", "audit": "audit"}
"""Columns for what exact cells were proven by."""
LEFT_OUT = {"padded left": "padded", "no packed labels": "labels"}
"""Columns for exact cells of which a part is not served."""

Result = dict[str, Any]
"""What is recorded of a release."""


def header(release: Release, about: Mapping[str, Any]) -> Result:
    """What a result says of the release itself: its packages, and why autopack refuses it if it does."""
    packages = {name: about[name] for name in ("python", "torch", "tokenizers", "huggingface-hub") if name in about}
    wrong = {name: about[name] for name in ("refused", "crash") if name in about}
    return {"transformers": release.transformers, "with": packages, **wrong}


def compact(release: Release, about: Mapping[str, Any], cells: Iterable[Cell], code: str) -> Result:
    """What is recorded of cells that the `code` of that digest has measured; nothing but the header without types."""
    result = header(release, about)
    return {**result, **_compacted(cells, [code])} if "types" in about else result


def _compacted(cells: Iterable[Cell], code: Sequence[str], worst: float = 0.0) -> Result:
    """A line per model type with a word per mode; reasons once, under the numbers that words name."""
    cells = sorted(cells, key=lambda cell: (cell["task"], cell["type"]))
    modes = sorted({cell["mode"] for cell in cells}, key=_order)
    usual = usual_source(cells)
    reasons: dict[str, str] = {}
    tasks: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        words = tasks.setdefault(cell["task"], {}).setdefault(cell["type"], [""] * len(modes))
        words[modes.index(cell["mode"])] = word_of(cell, usual, reasons)
    proven = proofs(cells)
    return {
        "code": list(code),
        "worst error": max([worst, *(cell["worst"] for cell in cells if "worst" in cell)]),
        "proven": {source: proven[source] for source in SOURCES if proven[source]},
        "usual": usual,
        "modes": modes,
        "cells": tasks,
        "reasons": dict(sorted(reasons.items())),
    }


def cells_of(result: Result) -> list[Cell]:
    """The cells that a result holds, as they were measured but for their single worst errors."""
    found = []
    for task, types in result.get("cells", {}).items():
        for name, words in types.items():
            for mode, word in zip(result["modes"], words, strict=True):
                if word:
                    cell = cell_of(word, result.get("usual"), result["reasons"])
                    found.append({"task": task, "type": name, "mode": mode, **cell})
    return found


def proofs(cells: Iterable[Cell]) -> Counter[str]:
    """How many exact cells were proven by what; none of those that were recorded before that was said."""
    found = (source_of(cell) for cell in cells if cell["status"] == "exact")
    return Counter(source for source in found if source is not None)


def _order(mode: str) -> tuple[int, str]:
    return (MODES.index(mode) if mode in MODES else len(MODES)), mode


def counts(result: Result, task: str | None = None) -> Counter[str]:
    """How many cells of a result, or of one of its tasks, have each status."""
    tasks = result.get("cells", {})
    chosen = tasks.values() if task is None else [tasks.get(task, {})]
    return Counter(status_of(word) for types in chosen for words in types.values() for word in words if word)


def bad(result: Result) -> list[str]:
    """A line for every kind of leak and crash of a result: the reason, and the cells that have it."""
    names: dict[str, list[str]] = {}
    for cell in cells_of(result):
        if cell["status"] in ("LEAK", "crash"):
            said = f"{cell['status']}: {{}}: {cell['reason']}"
            names.setdefault(said, []).append(f"{cell['type']}/{cell['task']}/{cell['mode']}")
    found = [said.replace("{}", ", ".join(cells), 1) for said, cells in names.items()]
    if "crash" in result:
        found.append(f"crash: {result['crash']}")
    return found + [f"scenario {name}: {said}" for name, said in result.get("scenarios", {}).get("failed", {}).items()]


def path_of(release: Release) -> Path:
    """Where the result of a release is recorded."""
    return RESULTS / f"{release.transformers}.json"


def load_results(matrix: Matrix) -> dict[str, Result]:
    """The recorded results of the listed releases, by release; those without one are left out."""
    paths = {release.transformers: path_of(release) for release in matrix.releases}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def of_default_call(result: Result) -> bool:
    """Whether the cells of a result are what `autopack.enable(model)` gives; older records were made without its
    proof."""
    return "cells" not in result or "code" in result


def merged(release: Release, result: Result) -> Result:
    """A result of some cells, or of the scenarios, laid over what is recorded of the release."""
    path = path_of(release)
    earlier: Result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "cells" not in result or "cells" not in earlier:
        return {**earlier, **result}
    cells = {(cell["task"], cell["type"], cell["mode"]): cell for each in (earlier, result) for cell in cells_of(each)}
    code = dict.fromkeys([*earlier.get("code", ()), *result["code"]])
    worst = max(earlier["worst error"], result["worst error"])
    return {**earlier, **result, **_compacted(cells.values(), list(code), worst)}


def record(release: Release, result: Result) -> None:
    """Write the result of a release; scenarios that were recorded earlier stay."""
    path = path_of(release)
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {name: earlier[name] for name in ("scenarios",) if name in earlier and name not in result}
    ordered = {name: value for name, value in {**result, **kept}.items() if name != "reasons"}
    ordered |= {"reasons": result["reasons"]} if "reasons" in result else {}
    path.write_text(json_by_lines(ordered) + "\n", encoding="utf-8")


def json_by_lines(data: Any, depth: int = 3) -> str:
    """JSON in which every entry of a dictionary of dictionaries, down to a depth, has a line, which diffs can show."""
    if not depth or not isinstance(data, dict):
        return json.dumps(data)
    entries = [f"{json.dumps(name)}: {json_by_lines(value, depth - 1)}" for name, value in data.items()]
    return "{\n" + textwrap.indent(",\n".join(entries), " ") + "\n}"


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def counts_rows(tasks: Sequence[str], results: Mapping[str, Result], names: Iterable[str]) -> list[list[str]]:
    """The rows of the table, header first: one per release, with four counts per task and what is known of all."""
    rows = [["transformers", *tasks, "all", "exact of what stock runs", *PROVEN, *LEFT_OUT, "other", "scenarios"]]
    for name in names:
        result = results.get(name, {})
        if "cells" not in result:
            said = next((word for word in ("refused", "crash") if word in result), "not run yet")
            rows.append([name, *[said] * (len(tasks) + 1), *[""] * (len(PROVEN) + len(LEFT_OUT) + 2)])
        else:
            rows.append([name, *(_numbers(counts(result, task)) for task in tasks), *_of_all([result])])
        rows[-1].append(_scenarios(result))
    return rows


def share(found: Counter[str]) -> float:
    """The share of exact cells among those that stock runs, in per cent."""
    return 100 * found["exact"] / max(1, sum(found[status] for status in COLUMNS))


def rounded_down(percent: float) -> str:
    """A share with one decimal that never says more than there is: 100 % is all of them."""
    return f"{int(10 * percent) / 10:g} %"


def _of_all(results: Sequence[Result]) -> list[str]:
    found: Counter[str] = sum(map(counts, results), Counter())
    cells = [cell for result in results for cell in cells_of(result) if cell["status"] == "exact"]
    proven = proofs(cells)
    of_proof = [str(proven[source]) if proven else "" for source in PROVEN.values()]
    without = [str(sum(name in cell for cell in cells)) if proven else "" for name in LEFT_OUT.values()]
    other = str(found["upstream error"] + found["unbuildable"])
    return [_numbers(found), rounded_down(share(found)), *of_proof, *without, other]


def _numbers(found: Counter[str]) -> str:
    return " / ".join(str(found[status]) for status in COLUMNS)


def _scenarios(result: Result) -> str:
    found = result.get("scenarios")
    if found is None:
        return ""
    failed = len(found["failed"])
    return f"{found['passed']} passed" + (f", {failed} FAILED" if failed else "")


def type_rows(result: Result) -> list[list[str]]:
    """A row for each type of each task of one result, header first."""
    rows = [["transformers", "task", "model type", *result.get("modes", ())]]
    for task, types in result.get("cells", {}).items():
        rows += [[result["transformers"], task, name, *words] for name, words in types.items()]
    return rows


def markdown(matrix: Matrix, results: Mapping[str, Result]) -> str:
    """The generated compat/results/README.md."""
    names = [release.transformers for release in matrix.releases]
    older = {name: result for name, result in results.items() if not of_default_call(result)}
    results = {name: result for name, result in results.items() if name not in older}
    header, *rows = counts_rows(matrix.tasks, results, [name for name in names if name not in older])
    per_task = [
        _numbers(sum((counts(result, task) for result in results.values()), Counter())) for task in matrix.tasks
    ]
    rows.append(["**all**", *per_task, *_of_all(list(results.values())), ""])
    wrong = [f"* transformers {name}: {line}" for name, result in results.items() for line in bad(result)]
    lines = [
        "<!-- Generated by `python -m compat.run`; do not edit. -->",
        "# Tested releases",
        "",
        textwrap.fill(_about(matrix).strip(), 120, break_on_hyphens=False),
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if wrong:
        lines += ["", "## Leaks and crashes", "", *wrong]
    if older:
        lines += ["", "## Not by the default call yet", "", textwrap.fill(_of_older(older), 120)]
    return "\n".join(lines) + "\n"


def _about(matrix: Matrix) -> str:
    modes, counted = ", ".join(matrix.modes), " / ".join(COLUMNS.values())
    return f"""
Every minor release of transformers at its last patch, torch {matrix.torch}, CPU, float32, tiny random models: every
model type that the release has, with {modes} as far as its class declares them (flash and flex by stand-ins of the
kernels' signatures). A cell is a type with one of these, as `autopack.enable(model)` without another word serves it.
Counted are cells that are {counted}; then exact cells by what `enable` knew that from (covered by the record, proven by
a twin, part by part, by an audit), and exact cells whose padded batches stay as they came or whose packed rows take no
labels; *other* are cells in which stock itself raises on one document, or of which no tiny model can be made.
[releases](releases) has every cell, with reasons."""


def _of_older(older: Mapping[str, Result]) -> str:
    found: Counter[str] = sum(map(counts, older.values()), Counter())
    return f"""These releases were recorded with `verify=False`, which no user writes, so their numbers stand apart:
{found["exact"]:,} cells exact, {found["refused"]:,} refused, {found["LEAK"] + found["crash"]} wrong in transformers
{", ".join(older)}. `python -m compat.run --only RELEASE` records one anew."""


def write_table(matrix: Matrix) -> None:
    """Write the generated page anew."""
    TABLE.write_text(markdown(matrix, load_results(matrix)), encoding="utf-8")


def stale(matrix: Matrix) -> tuple[list[str], list[str]]:
    """What contradicts the matrix among the recorded results and the generated page, and what has no record yet."""
    results = load_results(matrix)
    wrong, missing = [], []
    for release in matrix.releases:
        name = release.transformers
        result = results.get(name, {})
        if not {"cells", "refused", "crash"} & set(result) or not of_default_call(result):
            missing.append(name)
            continue
        pins = {"torch": matrix.torch, "tokenizers": release.tokenizers, "huggingface-hub": release.hub}
        found = {package: result["with"].get(package, "").partition("+")[0] for package in pins}
        if found != pins:
            wrong.append(f"transformers {name} was recorded with other packages than {MATRIX.name} pins: {found}.")
        if "cells" in result:
            lacking = [task for task in matrix.tasks if task not in result["cells"]]
            if lacking or result["modes"] != list(matrix.modes):
                wrong.append(f"transformers {name} was recorded with other tasks or modes than {MATRIX.name} has.")
        wrong += [f"transformers {name} was recorded with {line}" for line in bad(result)]
    listed = {release.transformers for release in matrix.releases}
    wrong += [
        f"{path.name} belongs to no listed release." for path in RESULTS.glob("*.json") if path.stem not in listed
    ]
    if not TABLE.is_file() or TABLE.read_text(encoding="utf-8") != markdown(matrix, results):
        wrong.append(f"{TABLE.relative_to(ROOT)} is not what the matrix and the recorded results give.")
    return wrong, missing
