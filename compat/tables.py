"""Results: what a run of the derived tests gave, how it is recorded, and the tables made from the records."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compat.matrix import COMPAT, MATRIX, ROOT, Matrix, Version

RESULTS = COMPAT / "results"
TABLE = RESULTS / "README.md"


def parse_report(xml: str) -> list[dict[str, Any]]:
    """Turns pytest's junit report into one cell per model type and mode, with the outcome of every check.

    The derived tests record the properties `check`, `model`, `mode` and the number they measured, `worst`.
    A failure that cannot be attributed (an error while pytest collects) becomes a cell without a model type.
    """
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        outcome, message = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if (found := case.find(kind)) is not None:
                outcome, message = name, (found.get("message") or "").strip()
                break
        model, mode = properties.get("model", ""), properties.get("mode", "")
        if not model and outcome != "failed":
            continue
        check: dict[str, Any] = {"outcome": outcome}
        if "worst" in properties:
            check["worst"] = float(f"{float(properties['worst']):.1e}")
        if message:
            check["message"] = message.splitlines()[0][:300]
        cell = cells.setdefault((model, mode), {"model": model, "mode": mode, "checks": {}})
        cell["checks"][properties.get("check") or case.get("name", "?")] = check
    return list(cells.values())


def missing_cells(matrix: Matrix, version: Version, result: dict[str, Any]) -> list[str]:
    """The model types and modes that the matrix lists and for which the result holds no audit, passed or failed."""
    there = {
        f"{cell['model']}/{cell['mode']}"
        for cell in result["cells"]
        if cell["checks"].get("audit", {}).get("outcome") in ("passed", "failed")
    }
    return [cell for cell in matrix.cells_of(version) if cell not in there]


def failures(result: dict[str, Any]) -> list[str]:
    """A line for every way to fail: the first line of what pytest said, and the checks that it said it of."""
    said: dict[str, list[str]] = {}
    for cell in result["cells"]:
        for name, check in cell["checks"].items():
            if check["outcome"] == "failed":
                said.setdefault(check.get("message", ""), []).append(
                    f"{cell['model']}/{cell['mode']} {name}".strip("/ ")
                )
    return [f"{'; '.join(names)}: {message}" for message, names in said.items()]


def result_path(version: Version) -> Path:
    """Where the result of a version is recorded."""
    return RESULTS / f"{version.transformers}.json"


def load_results(matrix: Matrix) -> dict[str, dict[str, Any]]:
    """The recorded results of the listed versions, by version; versions without one are left out."""
    paths = {version.transformers: result_path(version) for version in matrix.versions}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def cell_text(version: Version, result: dict[str, Any] | None, model: str, mode: str) -> str:
    """What the table says about one model type in one mode: exact with the worst error, failed, or not there."""
    checks = _checks(result, model, "" if model in version.absent else mode)
    absent = model in version.absent or f"{model}/{mode}" in version.absent
    if failed := [name for name, check in checks.items() if check["outcome"] == "failed"]:
        return f"failed: {', '.join(failed)}"
    if absent:
        return "not there"
    return f"exact, {_number(checks, 'audit')}" if _audited(checks) else "not run"


def _audited(checks: dict[str, Any]) -> bool:
    return checks.get("audit", {}).get("outcome") == "passed"


def _checks(result: dict[str, Any] | None, model: str, mode: str) -> dict[str, Any]:
    cells = result["cells"] if result else []
    return next((cell["checks"] for cell in cells if (cell["model"], cell["mode"]) == (model, mode)), {})


def _number(checks: dict[str, Any], prefix: str) -> str:
    worst = [check["worst"] for name, check in checks.items() if name.startswith(prefix) and "worst" in check]
    return f"{max(worst):.0e}".replace("0e+00", "0") if worst else "-"


def table_rows(matrix: Matrix, results: dict[str, dict[str, Any]], versions: Iterable[Version]) -> list[list[str]]:
    """The rows of the table, header first: one per version and model type."""
    rows = [["transformers", "model type", *matrix.modes, "checkpointed gradients", "stock model leaks"]]
    for version in versions:
        result = results.get(version.transformers)
        for model in matrix.models:
            checks = [_checks(result, model, mode) for mode in matrix.modes]
            row = [version.transformers, model]
            row += [cell_text(version, result, model, mode) for mode in matrix.modes]
            for prefix in ("gradients", "control"):
                row.append(" / ".join(_number(check, prefix) for check in checks) if any(checks) else "-")
            rows.append(row)
    return rows


def plain_table(rows: list[list[str]]) -> str:
    """The table for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def markdown(matrix: Matrix, results: dict[str, dict[str, Any]]) -> str:
    """The generated compat/results/README.md."""
    header, *rows = table_rows(matrix, results, matrix.versions)
    modes = " / ".join(matrix.modes)
    lines = [
        "<!-- Generated by `python compat/run.py`; do not edit. -->",
        "# Tested versions",
        "",
        f"Tiny random models on the CPU in fp32, torch {matrix.torch}. *exact* gives the worst relative error of "
        "`autopack.audit`; the gradients (two layouts before one backward, reentrant checkpointing and not) and the "
        f"leak of the stock model in a plain call, for comparison, are given as {modes}.",
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if matrix.planned:
        lines += ["", "Not tested yet:", "", *(f"* transformers {name}: {reason}" for name, reason in matrix.planned)]
    return "\n".join(lines) + "\n"


def record(version: Version, result: dict[str, Any]) -> None:
    """Writes the result of a version."""
    RESULTS.mkdir(exist_ok=True)
    result_path(version).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def stale(matrix: Matrix) -> list[str]:
    """What is out of date or missing among the recorded results and the generated table."""
    results = load_results(matrix)
    problems = []
    for version in matrix.versions:
        name = version.transformers
        if name not in results:
            problems.append(f"transformers {name} has no recorded result.")
        elif results[name]["requirements"] != matrix.requirements(version):
            problems.append(f"transformers {name} was recorded with other pins than {MATRIX.name} lists now.")
        elif missing := missing_cells(matrix, version, results[name]):
            problems.append(f"transformers {name} has no recorded result for {', '.join(missing)}.")
        elif failed := failures(results[name]):
            problems.append(f"transformers {name} was recorded with failures: {'; '.join(failed)}.")
    listed = {version.transformers for version in matrix.versions}
    recorded = [path for path in RESULTS.glob("*.json") if path.name[0].isdigit()]
    problems += [f"{path.name} belongs to no listed version." for path in recorded if path.stem not in listed]
    if not TABLE.is_file() or TABLE.read_text(encoding="utf-8") != markdown(matrix, results):
        problems.append(f"{TABLE.relative_to(ROOT)} is not what the matrix and the recorded results give.")
    return problems
