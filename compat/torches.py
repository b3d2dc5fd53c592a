"""Measure a dozen model types with other versions of torch and Python: the lines of [torches] in matrix.toml.

    python -m compat.torches                        every line, one after the other
    python -m compat.torches --only 2.4.1 2.15.0    some of them; the others stay as they are recorded
    python -m compat.torches --check                fails where the record is not of the lines that are listed

Each line has a virtual environment of its own, which is made by pip and deleted afterwards (7 GB where torch brings
CUDA, as on Linux it does). A line whose Python or packages cannot be had is recorded as not run, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from compat import workers
from compat.environments import cache_directory
from compat.finished import code_digest
from compat.matrix import COMPAT, MATRIX, ROOT, CompatError, Line, Matrix, load_matrix, tomllib
from compat.tables import COLUMNS, LEFT_OUT, PROVEN, Result, bad, cells_of, compact, counts, json_by_lines, proofs
from compat.workers import Unit

RESULTS = COMPAT / "results" / "torches.json"
TABLE = RESULTS.with_suffix(".md")
_NEEDS = ("tqdm", "packaging", "tomli; python_version < '3.11'")
"""What the code that measures imports beside what autopack does."""


class TorchEnvironment:
    """The virtual environment of one line; nothing is made before `build`."""

    def __init__(self, matrix: Matrix, line: Line, cache: Path) -> None:
        self.line = line
        self.release = next(each for each in matrix.releases if each.transformers == line.transformers)
        self.path = cache / "torches" / f"{line.torch}-py{line.python.replace('.', '')}"
        self.log = self.path.with_name(f"{self.path.name}.log")
        self.python = str(self.path / "bin" / "python")

    def environ(self) -> dict[str, str]:
        """The variables of a process that runs in it."""
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environ.update(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
        return {**environ, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def build(self) -> None:
        """Make it. Raises `CompatError` where there is no such Python, or pip does not find a package for it."""
        python = interpreter(self.line.python)
        if python is None:
            raise CompatError(f"no Python {self.line.python} on this machine")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._logged([python, "-m", "venv", "--clear", str(self.path)])
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        packages = [f"torch=={self.line.torch}", *self.release.pins, *project["dependencies"], *_NEEDS]
        install = ["install", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
        self._logged([self.python, "-m", "pip", *install, *packages])

    def remove(self) -> None:
        """Delete it; its log stays."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _logged(self, command: Sequence[str]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            errors = [line for line in self.log.read_text(encoding="utf-8").splitlines() if line.startswith("ERROR")]
            raise CompatError(f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {' '.join(errors[-2:])}")


def interpreter(python: str) -> str | None:
    """A Python of this minor version: the running one, one on the path, or one that pyenv has installed."""
    if python == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{python}.*/bin/python"))
    return str(installed[-1]) if installed else shutil.which(f"python{python}")


def measure(matrix: Matrix, line: Line, limit: float, keep: bool = False) -> Result:
    """What is recorded of a line: its cells as those of a release, or `not run` with the reason."""
    environment = TorchEnvironment(matrix, line, cache_directory())
    try:
        environment.build()
        about = workers.introduction(environment)
        units = [
            Unit(task, name, matrix.modes)
            for task in matrix.tasks
            for name in matrix.line_types
            if name in about.get("types", {}).get(task, ())
        ]
        total = sum(len(unit.modes) for unit in units)
        cells = list(tqdm(workers.measure(environment, units, limit), line.name, total, unit="cell", disable=None))
        return compact(environment.release, about, cells, code_digest())
    except CompatError as error:
        return {"not run": " ".join(str(error).split())[:400]}
    finally:
        if not keep:
            environment.remove()


def load() -> dict[str, Result]:
    """What is recorded, by the names of lines."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def record(results: Mapping[str, Result], matrix: Matrix) -> None:
    """Write what is recorded of the listed lines, in their order, and the page."""
    kept = {line.name: results[line.name] for line in matrix.lines if line.name in results}
    RESULTS.write_text(json_by_lines(kept, depth=4) + "\n", encoding="utf-8")
    TABLE.write_text(markdown(matrix, kept), encoding="utf-8")


def markdown(matrix: Matrix, results: Mapping[str, Result]) -> str:
    """The generated page."""
    head = ["torch", "Python", "transformers", " / ".join(COLUMNS.values()), *PROVEN, *LEFT_OUT, "other"]
    rows = [_row(line, results.get(line.name, {"not run": "not yet"})) for line in matrix.lines]
    lines = [
        "<!-- Generated by `python -m compat.torches`; do not edit. -->",
        "# Other versions of torch",
        "",
        textwrap.fill(" ".join(_about(matrix).split()), 120, break_on_hyphens=False),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if said := [text for line in matrix.lines for text in _not_exact(line, results.get(line.name, {}))]:
        lines += ["", "## What is not exact", "", *said]
    return "\n".join(lines) + "\n"


def _not_exact(line: Line, result: Result) -> list[str]:
    """A line for each reason for which cells are not exact, with the cells."""
    names: dict[str, list[str]] = {}
    for cell in cells_of(result):
        if cell["status"] not in ("exact", "absent"):
            said = f"{cell['status']}: {cell['reason']}"
            names.setdefault(said, []).append(f"{cell['type']}/{cell['task']}/{cell['mode']}")
    return [f"* torch {line.name}: {', '.join(cells)}: {said}" for said, cells in names.items()]


def _about(matrix: Matrix) -> str:
    types, modes = ", ".join(matrix.line_types), ", ".join(matrix.modes)
    return f"""
{types} in all tasks that they have, with {modes} as far as their classes
declare them, each cell by the default call; the columns are those of [the releases](README.md). A line has the newest
transformers that its torch and its Python allow. [torches.json](torches.json) has every cell, with reasons."""


def _row(line: Line, result: Result) -> list[str]:
    row = [line.torch, result.get("with", {}).get("python", line.python), line.transformers]
    if "cells" not in result:
        said = next(f"{name}: {result[name]}" for name in ("not run", "refused", "crash") if name in result)
        return [*row, said, *[""] * (len(PROVEN) + len(LEFT_OUT) + 1)]
    cells = [cell for cell in cells_of(result) if cell["status"] == "exact"]
    proven, found = proofs(cells), counts(result)
    left = [str(sum(name in cell for cell in cells)) for name in LEFT_OUT.values()]
    other = str(found["upstream error"] + found["unbuildable"])
    numbers = " / ".join(str(found[status]) for status in COLUMNS)
    return [*row, numbers, *(str(proven[source]) for source in PROVEN.values()), *left, other]


def stale(matrix: Matrix) -> list[str]:
    """What of the record is not of the lines that are listed, or is wrong."""
    results = load()
    wrong = [f"{RESULTS.name} lacks torch {line.name}" for line in matrix.lines if line.name not in results]
    listed = {line.name: line for line in matrix.lines}
    for name, result in results.items():
        if name not in listed:
            wrong.append(f"{RESULTS.name} has torch {name}, which {MATRIX.name} does not list")
        elif "cells" in result:
            packages = result["with"]["torch"].partition("+")[0], result["transformers"]
            if packages != (listed[name].torch, listed[name].transformers):
                wrong.append(f"{RESULTS.name}, torch {name}: recorded with torch and transformers {packages}")
            wrong += [f"{RESULTS.name}, torch {name}: {line}" for line in bad(result)]
    if not TABLE.is_file() or TABLE.read_text(encoding="utf-8") != markdown(matrix, results):
        wrong.append(f"{TABLE.name} is not what {RESULTS.name} gives")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record lines; 1 where a cell leaks or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TORCH", help="versions of torch (default: all lines)")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds for a cell (default 120)")
    parser.add_argument("--check", action="store_true", help="fail if the record is out of date; measure nothing")
    arguments = parser.parse_args(argv)
    matrix = load_matrix()
    if arguments.check:
        wrong = stale(matrix)
        print("\n".join(wrong) or f"{RESULTS.name} is of the lines that are listed.")
        return 1 if wrong else 0
    chosen = [line for line in matrix.lines if not arguments.only or line.torch in arguments.only]
    if unknown := set(arguments.only or ()) - {line.torch for line in chosen}:
        parser.error(f"{MATRIX.name} lists no torch {', '.join(sorted(unknown))}")
    problems: list[str] = []
    for line in chosen:
        result = measure(matrix, line, arguments.limit, arguments.keep)
        record({**load(), line.name: result}, matrix)
        found = counts(result)
        said = ", ".join(f"{number} {status}" for status, number in found.items()) or _row(line, result)[3]
        print(f"torch {line.name}, transformers {line.transformers}: {said}", flush=True)
        problems += [f"torch {line.name}: {problem}" for problem in bad(result)]
    for problem in problems:
        print(f"FAILED {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
