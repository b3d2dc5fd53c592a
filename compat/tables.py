"""Results: how what a release gave is recorded, and the tables that are made of the records."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compat.matrix import COMPAT, MATRIX, MODES, ROOT, Matrix, Release

RESULTS = COMPAT / "results" / "releases"
TABLE = COMPAT / "results" / "README.md"
SHORT = {"exact": "exact", "absent": "-"}
"""What stands for a status without a reason; other words name one."""
COLUMNS = {"exact": "exact", "refused": "refused", "LEAK": "leaking", "crash": "crashing"}
"""What the table counts, by status; the rest is upstream's: stock raises, or no tiny model can be made."""

Result = dict[str, Any]
"""What is recorded of a release."""


def header(release: Release, about: Mapping[str, Any]) -> Result:
    """What a result says of the release itself: its packages, and why autopack refuses it if it does."""
    packages = {name: about[name] for name in ("python", "torch", "tokenizers", "huggingface-hub") if name in about}
    wrong = {name: about[name] for name in ("refused", "crash") if name in about}
    return {"transformers": release.transformers, "with": packages, **wrong}


def compact(release: Release, about: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> Result:
    """What is recorded: a line per model type with a word per mode; reasons once, under the number that words name."""
    cells = sorted(cells, key=lambda cell: (cell["task"], cell["type"]))
    modes = sorted({cell["mode"] for cell in cells}, key=_order)
    reasons: dict[str, str] = {}
    tasks: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        word = SHORT.get(cell["status"])
        if word is None or (cell["status"] == "exact" and "reason" in cell):
            number = hashlib.sha256(cell["reason"].encode()).hexdigest()[:4]
            reasons[number] = cell["reason"]
            word = f"{cell['status']} {number}"
        words = tasks.setdefault(cell["task"], {}).setdefault(cell["type"], [""] * len(modes))
        words[modes.index(cell["mode"])] = word
    result = header(release, about)
    if "types" not in about:
        return result
    worst = max((cell["worst"] for cell in cells if "worst" in cell), default=0.0)
    return {**result, "worst error": worst, "modes": modes, "cells": tasks, "reasons": dict(sorted(reasons.items()))}


def _order(mode: str) -> tuple[int, str]:
    return (MODES.index(mode) if mode in MODES else len(MODES)), mode


def status_of(word: str) -> str:
    """The status that a recorded word says."""
    known = {short: status for status, short in SHORT.items()}
    return known.get(word) or word.rpartition(" ")[0]


def counts(result: Result, task: str | None = None) -> Counter[str]:
    """How many cells of a result, or of one of its tasks, have each status."""
    tasks = result.get("cells", {})
    chosen = tasks.values() if task is None else [tasks.get(task, {})]
    return Counter(status_of(word) for types in chosen for words in types.values() for word in words if word)


def bad(result: Result) -> list[str]:
    """A line for every kind of leak and crash of a result: the reason, and the cells that have it."""
    names: dict[str, list[str]] = {}
    for task, types in result.get("cells", {}).items():
        for name, words in types.items():
            for mode, word in zip(result["modes"], words, strict=True):
                if status_of(word) in ("LEAK", "crash"):
                    names.setdefault(word, []).append(f"{name}/{task}/{mode}")
    found = []
    for word, cells in names.items():
        status, _, number = word.rpartition(" ")
        found.append(f"{status}: {', '.join(cells)}: {result['reasons'][number]}")
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


def merged(release: Release, result: Result) -> Result:
    """A result of some cells, or of the scenarios, laid over what is recorded of the release."""
    path = path_of(release)
    earlier: Result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "cells" not in result or "cells" not in earlier:
        return {**earlier, **result}
    modes = sorted({*earlier["modes"], *result["modes"]}, key=_order)
    words: dict[tuple[str, str], dict[str, str]] = {}
    for each in (earlier, result):
        for task, types in each["cells"].items():
            for name, line in types.items():
                by_mode = dict(zip(each["modes"], line, strict=True))
                words.setdefault((task, name), {}).update({mode: word for mode, word in by_mode.items() if word})
    tasks: dict[str, dict[str, list[str]]] = {}
    for (task, name), by_mode in sorted(words.items()):
        tasks.setdefault(task, {})[name] = [by_mode.get(mode, "") for mode in modes]
    used = {word.rpartition(" ")[2] for by_mode in words.values() for word in by_mode.values()}
    reasons = {n: said for n, said in sorted({**earlier["reasons"], **result["reasons"]}.items()) if n in used}
    worst = max(earlier["worst error"], result["worst error"])
    return {**earlier, **result, "worst error": worst, "modes": modes, "cells": tasks, "reasons": reasons}


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
    """The rows of the table, header first: one per release, with four counts per task and of all."""
    rows = [["transformers", *tasks, "all", "other", "scenarios"]]
    for name in names:
        result = results.get(name, {})
        if "cells" not in result:
            said = next((word for word in ("refused", "crash") if word in result), "not run yet")
            rows.append([name, *[said] * (len(tasks) + 1), "", _scenarios(result)])
            continue
        rows.append([name, *(_numbers(counts(result, task)) for task in tasks), *_totals(counts(result))])
        rows[-1].append(_scenarios(result))
    return rows


def _numbers(found: Counter[str]) -> str:
    return " / ".join(str(found[status]) for status in COLUMNS)


def _totals(found: Counter[str]) -> list[str]:
    return [_numbers(found), str(found["upstream error"] + found["unbuildable"])]


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
    header, *rows = counts_rows(matrix.tasks, results, names)
    total: Counter[str] = sum((counts(result) for result in results.values()), Counter())
    per_task = [
        _numbers(sum((counts(result, task) for result in results.values()), Counter())) for task in matrix.tasks
    ]
    rows.append(["**all**", *per_task, *_totals(total), ""])
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
    return "\n".join(lines) + "\n"


def _about(matrix: Matrix) -> str:
    modes, counted = ", ".join(matrix.modes), " / ".join(COLUMNS.values())
    return f"""
Every minor release of transformers at its last patch, torch {matrix.torch}, CPU, float32, tiny random models: every
model type that the release has, with {modes} as far as its class declares them (flash and flex by stand-ins of the
kernels' signatures). A cell is a type with one of these. Counted are cells that are {counted}; *other* are those in
which stock itself raises on one document, or of which no tiny model can be made. [releases](releases) has every cell,
with reasons."""


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
        if not {"cells", "refused", "crash"} & set(result):
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
