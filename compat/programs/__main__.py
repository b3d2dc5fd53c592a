"""Run a training program as its users do, stock and under `autopack run`, and compare what both log
in every step.

    python -m compat.programs llamafactory --python ENV/bin/python            all its runs
    python -m compat.programs llamafactory --python ENV/bin/python --record   and write the results
    python -m compat.programs trl_trainers --only SFT --max-tokens 64         its optimizer steps cut anew
    python -m compat.programs --page                                          write docs/programs.md anew

With `--only`, `--record` puts the named runs among the recorded ones. ENV is a virtual environment
of the program's own: programs.json says what pip installs there (`install`) beside autopack. A
command that trains by a Trainer leaves its `trainer_state.json` below `output`; other runs write
`output/steps.json`, the numbers of each step by their names.

A run is `exact` where all losses and gradient norms of all steps agree to 1e-5, `apart` where
documents share rows that stock lets see each other, or where stock predicts the first token of a
row from the padding on its left (then those of autopack are the documents' alone, and have to
differ), `ended` where only one of both ran. With `--max-tokens`, it is `not cut` where the numbers
agree and autopack left the steps as they were; losses and gradient norms are compared."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compat.common import write_json
from compat.matrix import ROOT
from compat.programs._drivers import command, programs
from compat.programs._words import DTYPE

RESULTS = ROOT / "compat" / "results" / "programs"
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
    "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in (%r, "
    "'transformers', 'torch')), sep=', ')"
)


def main() -> int:
    """Run one program; 1 where a run that stock makes ends, or logs other numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", nargs="?", choices=programs())
    parser.add_argument(
        "--python", type=Path, default=sys.executable, help="of an environment that has the program"
    )
    parser.add_argument("--only", nargs="+", default=[], help="words of runs")
    parser.add_argument(
        "--max-tokens", help="cut the optimizer steps anew; results are recorded beside the others"
    )
    parser.add_argument("--record", action="store_true", help="write the results and their page")
    parser.add_argument(
        "--page", action="store_true", help="write the page of what is recorded, and run nothing"
    )
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(recorded()))
        return 0
    if given.program is None:
        parser.error("which program?")
    wanted = [
        run
        for run in programs()[given.program]["runs"]
        if not given.only or any(word in run for word in given.only)
    ]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(given.program, given.python, Path(folder), max_tokens=given.max_tokens)
        for run in tqdm(wanted):
            found[run] = runner.compared(run)
            if found[run]["verdict"] == "exact" and found[run]["worst"] > _ROUNDING:
                with tempfile.TemporaryDirectory() as other:
                    again = Runner(
                        given.program, given.python, Path(other), "float64", given.max_tokens
                    ).compared(run)
                found[run]["float64"] = again.get("worst")
            tqdm.write(f"{run}: {found[run]}")
        if given.record:
            _record(given.program, runner.versions(), found, given.max_tokens)
    return 1 if any(each["verdict"] in ("ended", "other numbers") for each in found.values()) else 0


class Runner:
    """Runs of one program in a folder of their own, with models whose weights are of a type."""

    def __init__(
        self,
        name: str,
        python: Path,
        folder: Path,
        dtype: str = "float32",
        max_tokens: str | None = None,
    ):
        self.name, self.python, self.folder, self.max_tokens = name, python, folder, max_tokens
        self.program = programs()[name]
        stand_ins = folder / "stand_ins"
        stand_ins.mkdir()
        for each in self.program.get("stand_ins", ()):
            if subprocess.run(
                [python, "-c", f"import {each}"], capture_output=True, check=False
            ).returncode:
                (stand_ins / f"{each}.py").write_text('"""Empty."""\n')
        path = os.pathsep.join([str(ROOT), str(stand_ins)])
        same = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        self.environment = {**os.environ, "PYTHONPATH": path, DTYPE: dtype, **same}
        prepared = [str(python), "-m", "compat.programs._drivers", name, str(folder)]
        subprocess.run(prepared, check=True, env=self.environment, capture_output=True)

    def versions(self) -> str:
        asked = [self.python, "-c", _VERSIONS % self.program["package"]]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()

    def compared(self, run: str) -> dict[str, Any]:
        """The verdict on one run."""
        stock, said = self._run(run, enabled=False)
        if stock is None:
            return {"verdict": "no stock", "reason": said}
        ours, said = self._run(run, enabled=True)
        if ours is None:
            return {"verdict": "ended", "reason": said}
        if len(ours) != len(stock):
            return {"verdict": "ended", "reason": f"{len(ours)} steps, and {len(stock)} of stock"}
        # What trainers average over forwards is another mean where there are other forwards.
        left_out = (
            {name for step in stock for name in step} - {"loss", "grad_norm"}
            if self.max_tokens
            else set()
        )
        pairs = [
            (a[name], b.get(name))
            for a, b in zip(stock, ours, strict=True)
            for name in a
            if name not in left_out
        ]
        worst = max((abs(a - b) / max(1.0, abs(a)) if b is not None else 1.0) for a, b in pairs)
        packed, lines = _PACKED.search(said), _LINE.findall(said)
        apart = run in self.program.get("apart", ())
        same = "not cut" if self.max_tokens and _NOT_CUT.search(said) else "exact"
        verdict = same if worst <= _TOLERANCE else "apart" if apart else "other numbers"
        skipped = float(packed[1]) if packed is not None else 0.0
        return {
            "verdict": verdict,
            "steps": len(stock),
            "worst": worst,
            "padding skipped": skipped,
            "said": lines[-1:],
        }

    def _run(self, run: str, enabled: bool) -> tuple[list[dict[str, float]] | None, str]:
        output = (
            self.folder
            / f"{run.replace(', ', '_').replace(' ', '_')}_{'ours' if enabled else 'stock'}"
        )
        options = ("--max-tokens", self.max_tokens) if self.max_tokens else ()
        before = ("-m", "autopack", "run", *options) if enabled else ()
        output.mkdir()
        asked = [self.python, *before, *command(self.name, run, self.folder, output)]
        ended = subprocess.run(
            asked,
            check=False,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        said = _PACKAGES.sub("", ended.stdout + ended.stderr)
        steps = _steps(output)
        if ended.returncode or not steps:
            return None, next((line for line in reversed(said.splitlines()) if line.strip()), "")[
                :300
            ]
        return steps, said


_PACKAGES = re.compile(r"/\S*/site-packages/")
"""Where packages lie on the machine that made a record."""


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


def recorded() -> dict[str, Any]:
    """What is recorded of each program, by the name of its module."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def _record(name: str, versions: str, found: dict[str, Any], max_tokens: str | None) -> None:
    stem = f"{name}.max_tokens" if max_tokens else name
    known, program = {**recorded().get(stem, {}).get("runs", {}), **found}, programs()[name]
    runs = {run: known[run] for run in program["runs"] if run in known}
    title = f"{program['name']}, --max-tokens {max_tokens}" if max_tokens else program["name"]
    write_json(RESULTS / f"{stem}.json", {"name": title, "with": versions, "runs": runs})
    PAGE.write_text(page(recorded()))


def page(found: dict[str, Any]) -> str:
    """The page of all programs."""
    lines = [
        "# Training programs",
        "",
        "Other people's programs, run by their own commands with their defaults on tiny models: "
        "stock, and under `autopack run`. Written by `python -m compat.programs PROGRAM --python "
        "ENV/bin/python --record`.",
        "",
        "`exact`: losses and gradient norms of all steps agree to 1e-5; where float32 differs by "
        "more than 1e-6, the run was made again in float64. `apart`: several documents share a "
        "row, and stock lets them see each other; autopack keeps them apart, says so once: losses "
        "are those of the documents alone. So it is where a row is padded on the left, and stock "
        "also predicts its first token [from "
        "padding](unpadding.md#what-differs-from-the-padded-run). Below `--max-tokens`, optimizer "
        "steps are [cut anew](steps.md), and `not cut` says that autopack left them as they were, "
        "with a warning; losses and gradient norms are compared, and nothing else that is logged. "
        "The last column is the share of the tokens that came which were padding and were not "
        "computed.",
    ]
    for each in found.values():
        lines += [
            "",
            f"## {each['name']}",
            "",
            f"{each['with']}, CPU.",
            "",
            "| run | | largest difference | padding skipped |",
        ]
        lines.append("|---|---|---|---|")
        for run, verdict in each["runs"].items():
            if "worst" in verdict:
                skipped = (
                    f"{verdict['padding skipped']:.0f} %" if verdict["padding skipped"] else "none"
                )
                worst = f"{verdict['worst']:.0e}"
                worst += (
                    f" ({verdict['float64']:.0e} in float64)"
                    if verdict.get("float64") is not None
                    else ""
                )
                lines.append(f"| {run} | {verdict['verdict']} | {worst} | {skipped} |")
            else:
                lines.append(f"| {run} | {verdict['verdict']}: {verdict['reason']} | | |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
