"""Write docs/reliability.md: what was tried to break autopack, how often, and what came of it, as
it is recorded.

python -m compat.reliability            write it anew
python -m compat.reliability --check    exit with 1 where it says something else than the records; write nothing
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from compat import readme, study
from compat.matrix import ROOT

PAGE = ROOT / "docs" / "reliability.md"
_BEGINNING = """# Reliability

What was done to break autopack, and what came of it. Written by `python -m compat.reliability` from recorded runs:
whoever doubts a number runs the command beside it again.
"""


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
    cells = found["cells"]
    survived = [name for name, cell in cells.items() if cell["status"] != "caught"]
    first = (
        f"{len(cells)} named functions of autopack, each broken in turn: its tests notice "
        f"{len(cells) - len(survived)}."
    )
    return [first, *(f"* not noticed: {name}" for name in survived)]


def _engines(found: dict[str, Any]) -> list[str]:
    counts = Counter(cell["status"] for cell in found["cells"].values())
    engines = {name.partition("/")[0] for name in found["cells"]}
    return [
        f"{len(engines)} ways of training on two and four processes, {len(found['cells'])} pairs "
        f"of a way and a type: {_counted(counts)}. [Several processes](distributed.md) says which."
    ]


def _neighbours(found: dict[str, Any]) -> list[str]:
    verdicts = [
        order[form]["status"]
        for cell in found["cells"].values()
        for order in cell.values()
        for form in ("packed", "padded")
        if order.get(form)
    ]
    packages = {name.partition(":")[0] for name in found["cells"]}
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


_SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "fuzz": ("Random cases against stock", _fuzz),
    "seams": ("Breaks that the tests notice", _seams),
    "kernels": ("Kernels of GPUs, interpreted on a CPU", _kernels),
    "engines": ("Training engines", _engines),
    "neighbours": ("Libraries beside autopack", _neighbours),
}


def page() -> str:
    """The text of docs/reliability.md."""
    # links as they are from docs/
    tables = (
        text.replace("](compat/", "](../compat/") for text in (readme.served(), readme.versions())
    )
    parts = [_BEGINNING, "## Model types and releases\n", *(f"{text}\n" for text in tables)]
    for name, (title, told) in _SECTIONS.items():
        found = study.recorded(name)
        body = told(found) if found else ["Not recorded yet."]
        lines = [
            line if line.startswith(("|", "*", "\n")) else textwrap.fill(line, 130) for line in body
        ]
        packages = ", ".join(f"{name} {number}" for name, number in found.get("with", {}).items())
        said = f", recorded with {packages}" if packages else ""
        parts.append(
            f"## {title}\n\n`python -m compat.{name} --record`{said}\n\n" + "\n".join(lines) + "\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with `--check` return 1 where that would change it."""
    return study.write_pages(__doc__, lambda: {PAGE: page()}, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
