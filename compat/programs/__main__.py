"""Run a training program as its users do, stock and under `autopack run`, and compare what both log
in every step.

    python -m compat.programs llamafactory --python ENV/bin/python --record   all its runs
    python -m compat.programs trl_trainers --cut SFT                          its optimizer steps cut anew

ENV is a virtual environment of the program's own: programs.json says what pip installs there
(`install`) beside autopack, and by how many tokens its steps are cut (`--max-tokens`), which is
recorded beside the others. A command that trains by a Trainer leaves its `trainer_state.json` below
`output`; other runs write `output/steps.json`, the numbers of each step by their names.

A run is `exact` where all losses and gradient norms of all steps agree to 1e-5, `apart` where
documents share rows that stock lets see each other, or where stock predicts the first token of a
row from the padding on its left (then those of autopack are the documents' alone, and have to
differ), `ended` where only one of both ran. With `--cut`, it is `not cut` where the numbers agree
and autopack left the steps as they were; losses and gradient norms are compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compat import matrix, study
from compat.matrix import ROOT
from compat.programs._drivers import command, programs
from compat.programs._words import DTYPE
from compat.study import Cells, Study, Verdict
from compat.tables import markdown_table

PAGE = ROOT / "docs" / "programs.md"
_TOLERANCE = 1e-5
"""Relative, for numbers that trainers log rounded: float32 on rows of another order leaves about
1e-7."""
_ROUNDING = 1e-6
"""A run that differs by more is made again in float64, where rounding is a billionth of that and a
fault stays."""
_PACKED = re.compile(
    r"packed inside; [\d,]+ of [\d,]+ tokens were padding and were not computed \(([\d.]+)%\)"
)
_NOT_CUT = re.compile("autopack leaves the steps of this run as they are")
_LINE = re.compile(r"^autopack: .*", re.MULTILINE)
_VERSIONS = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({n: m.version(n) for n in (%r, 'transformers', 'torch')}))"
)


_PACKAGES = re.compile(r"/\S*/site-packages/")
"""Where packages lie on the machine that made a record."""


class Runner:
    """Runs of one program in a folder of their own, with models whose weights are of a type."""

    def __init__(
        self, name: str, python: Path, folder: Path, dtype: str = "float32", cut: bool = False
    ):
        self.name, self.python, self.folder = name, python, folder
        self.program = programs()[name]
        self.options = ["--max-tokens", str(self.program["max_tokens"])] if cut else []
        stand_ins = folder / "stand_ins"
        stand_ins.mkdir()
        path = os.pathsep.join([str(ROOT), str(stand_ins)])
        same = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", DTYPE: dtype}
        self.environment = {**os.environ, "PYTHONPATH": path, **same}
        for each in self.program.get("stand_ins", ()):
            if self._python("-c", f"import {each}").returncode:
                (stand_ins / f"{each}.py").write_text('"""Empty."""\n')
        self._python("-m", "compat.programs._drivers", name, folder).check_returncode()

    def _python(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *map(str, arguments)],
            check=False,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def compared(self, run: str) -> dict[str, Any]:
        """The verdict on one run."""
        found, said = [], ""
        for verdict in ("no stock", "ended"):
            steps, said = self._run(run, enabled=verdict == "ended")
            if not steps:
                return {"verdict": verdict, "reason": said}
            found.append(steps)
        stock, ours = found
        if len(ours) != len(stock):
            return {"verdict": "ended", "reason": f"{len(ours)} steps, and {len(stock)} of stock"}
        worst = max(
            abs(value - b[name]) / max(1.0, abs(value)) if name in b else 1.0
            for a, b in zip(stock, ours, strict=True)
            for name, value in a.items()
            # What trainers average over forwards is another mean where there are other forwards.
            if name in ("loss", "grad_norm") or not self.options
        )
        packed, left = _PACKED.search(said), self.options and _NOT_CUT.search(said)
        other = "apart" if run in self.program.get("apart", ()) else "other numbers"
        return {
            "verdict": other if worst > _TOLERANCE else "not cut" if left else "exact",
            "steps": len(stock),
            "worst": worst,
            "padding skipped": float(packed[1]) if packed is not None else 0.0,
            "said": _LINE.findall(said)[-1:],
        }

    def _run(self, run: str, enabled: bool) -> tuple[list[dict[str, float]], str]:
        """What a program logged of each step, and what it said; nothing, and its last line, where it
        ended."""
        output = self.folder / (re.sub(r"\W", "_", run) + ("_ours" if enabled else "_stock"))
        output.mkdir()
        before = ("-m", "autopack", "run", *self.options) if enabled else ()
        ended = self._python(*before, *command(self.name, run, self.folder, output))
        said = _PACKAGES.sub("", ended.stdout + ended.stderr)
        steps = _steps(output)
        if steps and not ended.returncode:
            return steps, said
        lines = [line for line in said.splitlines() if line.strip()]
        return [], "".join(lines[-1:])[:300]


def _steps(output: Path) -> list[dict[str, float]]:
    """What a program logged of each step, and nothing where it logged none."""
    written = output / "steps.json"
    if written.exists():
        return json.loads(written.read_text())
    states = sorted(output.rglob("trainer_state.json"), key=lambda file: file.stat().st_mtime)
    logged = json.loads(states[-1].read_text())["log_history"] if states else []
    return [
        {name: entry[name] for name in ("loss", "grad_norm") if name in entry}
        for entry in logged
        if "loss" in entry
    ]


def _measured(name: str, python: Path, cut: bool, runs: list[str]) -> Iterator[tuple[str, Verdict]]:
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(name, python, Path(folder), cut=cut)
        for run in runs:
            found = runner.compared(run)
            if found["verdict"] == "exact" and found["worst"] > _ROUNDING:
                with tempfile.TemporaryDirectory() as other:
                    again = Runner(name, python, Path(other), "float64", cut).compared(run)
                found["float64"] = again.get("worst")
            yield run, found


def recorded() -> dict[str, Cells]:
    """The runs that are recorded of each program, by the name of its module."""
    files = sorted((matrix.RESULTS / "programs").glob("*.json"))
    return {file.stem: study.recorded(f"programs/{file.stem}")["cells"] for file in files}


_ABOUT = """# Training programs

Other people's programs, run by their own commands with their defaults on tiny models: stock, and under `autopack run`. Written by `python -m compat.programs PROGRAM --python ENV/bin/python --record`.

`exact`: losses and gradient norms of all steps agree to 1e-5; where float32 differs by more than 1e-6, the run was made again in float64. `apart`: several documents share a row, and stock lets them see each other; autopack keeps them apart, says so once: losses are those of the documents alone. So it is where a row is padded on the left, and stock also predicts its first token [from padding](unpadding.md#what-differs-from-the-padded-run). Below `--max-tokens`, optimizer steps are [cut anew](steps.md), and `not cut` says that autopack left them as they were, with a warning; losses and gradient norms are compared, and nothing else that is logged. The last column is the share of the tokens that came which were padding and were not computed."""


def page() -> str:
    """The page of all programs."""
    lines = [_ABOUT]
    for stem, runs in recorded().items():
        name, _, cut = stem.partition(".")
        program = programs()[name]
        title = program["name"] + (f", --max-tokens {program['max_tokens']}" if cut else "")
        packages = study.recorded(f"programs/{stem}")["with"].items()
        said = ", ".join(f"{package} {version}" for package, version in packages)
        rows = [["run", "", "largest difference", "padding skipped"]]
        rows += [[run, *_row(verdict)] for run, verdict in runs.items()]
        lines += ["", f"## {title}", "", f"{said}, CPU.", "", *markdown_table(rows)]
    return "\n".join([*lines, ""])


def _row(verdict: Verdict) -> list[str]:
    if "worst" not in verdict:
        return [f"{verdict['verdict']}: {verdict['reason']}", "", ""]
    worst, skipped, again = (verdict.get(n) for n in ("worst", "padding skipped", "float64"))
    said = f"{worst:.0e}" + (f" ({again:.0e} in float64)" if again is not None else "")
    return [verdict["verdict"], said, f"{skipped:.0f} %" if skipped else "none"]


def study_of(name: str, python: Path, cut: bool = False) -> Study:
    """The study of a program."""

    def versions() -> Any:
        asked = [python, "-c", _VERSIONS % programs()[name]["package"]]
        done = subprocess.run(asked, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    return Study(
        f"programs/{name}" + (".max_tokens" if cut else ""),
        str(__doc__),
        lambda: programs()[name]["runs"],
        lambda runs, _: _measured(name, python, cut, runs),
        lambda _, found: (
            found["verdict"] if found["verdict"] in ("ended", "other numbers") else None
        ),
        versions,
        pages=lambda _: {PAGE: page()},
    )


def main() -> int:
    """Run one program; 1 where a run that stock makes ends, or logs other numbers."""
    parser = study.parser_of(__doc__)
    parser.add_argument("program", choices=programs())
    parser.add_argument("--python", type=Path, default=sys.executable, help="of an environment")
    parser.add_argument("--cut", action="store_true", help="cut the optimizer steps anew")
    asked, rest = parser.parse_known_args()
    return study.main(study_of(asked.program, asked.python, asked.cut), rest)


if __name__ == "__main__":
    sys.exit(main())
