"""Write docs/reliability.md: what was tried to break autopack, how often, and what came of it, as
it is recorded.

python -m compat.reliability            write it anew
python -m compat.reliability --check    exit with 1 where it says something else than the records; write nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from compat import readme
from compat.matrix import ROOT

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "compat" / "results"

_BEGINNING = """# Reliability

What was done to break autopack, and what came of it. Written by `python -m compat.reliability` from recorded runs:
whoever doubts a number runs the command beside it again.
"""


def recorded(name: str) -> dict[str, Any] | None:
    """What a command has recorded; None where it has not been yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _fuzz(found: dict[str, Any]) -> list[str]:
    counted = ", ".join(f"{number:,} {status}" for status, number in found["counts"].items())
    failures = [f"* {failure['status']}: {failure['reason']}" for failure in found["failures"]]
    return [
        (
            f"{found['cases']:,} random cases (seed {found['seed']}), of {found['types']} types "
            f"and tasks: {counted}."
        ),
        *failures,
    ]


def _seams(found: dict[str, Any]) -> list[str]:
    survived = [each["name"] for each in found["seams"] if not each["caught"]]
    caught = len(found["seams"]) - len(survived)
    first = (
        f"{len(found['seams'])} named functions of autopack, each broken in turn: its tests notice "
        f"{caught}."
    )
    return [first, *(f"* not noticed: {name}" for name in survived)]


def _soak(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['steps']:,} optimizer steps on random layouts: the weights of a packed, enabled "
        "model beside those of stock on padded batches, relative to how far training has moved "
        "them. The yardstick is how far stock ends up from itself where the documents of each "
        "batch come in reverse order, which is rounding alone; at most "
        f"{found['bounds']['factor']:.0f} times that is wanted, at each of a hundred measurements.",
        "",
        (
            "| model | packed from padded | yardstick | at worst | objects more | MiB more | "
            "rounds of enabling |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for model in found["models"].values():
        lines.append(
            f"| {model['model_type']}, {model['task']} | {model['distance']:.1e} | "
            f"{model['yardstick']:.1e} | {model['worst_ratio']:.2f} × | {model['objects'][1]:+} | "
            f"{model['mebibytes'][1]:+} | {model['rounds']:,}: {model['objects_by_rounds']:+} "
            "objects |"
        )
        lines += [f"\n{wrong}\n" for wrong in model["wrong"]]
    return lines


def _engines(found: dict[str, Any]) -> list[str]:
    counts = Counter(cell["status"] for cell in found["cells"].values())
    engines = {name.partition("/")[0] for name in found["cells"]}
    return [
        f"{len(engines)} ways of training on two and four processes, {len(found['cells'])} pairs "
        f"of a way and a type: {_counted(counts)}. [Several processes](distributed.md) says which."
    ]


def _neighbours(found: dict[str, Any]) -> list[str]:
    verdicts = [
        row[form]["status"]
        for row in found["rows"]
        for form in ("packed", "padded")
        if row.get(form)
    ]
    packages = {row["neighbour"] for row in found["rows"]}
    return [
        f"{len(packages)} libraries, {len(verdicts)} calls, packed and padded, enabled before and "
        f"after them: {_counted(Counter(verdicts))}. [Neighbours](neighbours.md) has each."
    ]


def _kernels(found: dict[str, Any]) -> list[str]:
    cells = found["cells"]
    worst = {what: max(cell[what] for cell in cells.values()) for what in ("logits", "gradients")}
    kernels = {kernel for cell in cells.values() for kernel in cell["kernels"]}
    given = [name for name, cell in cells.items() if cell["verified"].startswith("not asked for")]
    return [
        f"{len(cells)} ways of running models through {len(kernels)} kernels of these packages, "
        "packed against "
        f"documents alone, forward and backward: at most {worst['logits']:.0e} off in logits or "
        "losses and "
        f"{worst['gradients']:.0e} in gradients. {len(given)} of them (Liger's) were enabled with "
        "`verify=False`, "
        "since proving them takes an interpreter too long; flash-attn was asked for by "
        '`backend="flash"`. '
        "Nothing here has run on a GPU.",
    ]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


_SECTIONS = (
    (
        "fuzz",
        "Random cases against stock",
        "python -m compat.fuzz --json compat/results/fuzz.json",
        _fuzz,
    ),
    (
        "seams",
        "Breaks that the tests notice",
        "python -m compat.seams --json compat/results/seams.json",
        _seams,
    ),
    (
        "kernels",
        "Kernels of GPUs, interpreted on a CPU",
        "python -m compat.kernels --json compat/results/kernels.json",
        _kernels,
    ),
    ("soak", "Long runs", "python -m compat.soak --json compat/results/soak.json", _soak),
    (
        "engines",
        "Training engines",
        "python -m compat.engines --json compat/results/engines.json",
        _engines,
    ),
    (
        "neighbours",
        "Libraries beside autopack",
        "python -m compat.neighbours --record",
        _neighbours,
    ),
)


def page() -> str:
    """The text of docs/reliability.md."""
    parts = [_BEGINNING]
    parts.append(
        "## Model types and "
        f"releases\n\n{_from_docs(readme.served())}\n\n{_from_docs(readme.versions())}\n"
    )
    for name, title, command, told in _SECTIONS:
        found = recorded(name)
        body = ["Not recorded yet."] if found is None else told(found)
        lines = [
            line if line.startswith(("|", "*", "\n")) else textwrap.fill(line, 130) for line in body
        ]
        said = (
            _with(found["with"])
            if found is not None and isinstance(found.get("with"), dict)
            else ""
        )
        parts.append(f"## {title}\n\n`{command}`{said}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _from_docs(text: str) -> str:
    """Text of README.md with its links as they are from docs/."""
    return text.replace("](compat/", "](../compat/")


def _with(packages: dict[str, str]) -> str:
    return ", recorded with " + ", ".join(f"{name} {number}" for name, number in packages.items())


def main(arguments: list[str] | None = None, path: Path = PAGE) -> int:
    """Write the page, or with `--check` return 1 where that would change it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where the page is out of date",
    )
    check = parser.parse_args(arguments).check
    wanted = page()
    if not check:
        path.write_text(wanted, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
        print(
            "docs/reliability.md is not what the records give; run `python -m compat.reliability`."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
