"""A run in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopack.bench.race import Spread, mebibytes
from benchmarks.gpu.job import FAILED

KINDS = {"forward": "forward, no gradients", "step": "training step"}


def line(name: str, outcome: dict[str, Any]) -> str:
    """What became of a part, in one line."""
    why = (
        outcome.get("reason")
        or (outcome.get("error") or {}).get("message")
        or "; ".join(outcome["problems"])
    )
    took = f" in {outcome['seconds']:.0f} s" if "seconds" in outcome else ""
    return f"{name:<22} {outcome['status']}{took}{f': {_cut(why)}' if why else ''}"


def table(result: dict[str, Any]) -> str:
    """All parts in words."""
    parts = result["parts"]
    lines = [
        f"{result['origin']['date']}, {result['settings']['minutes']:g} minutes at most",
        *_environment(parts),
        "",
    ]
    lines += [line(name, outcome) for name, outcome in parts.items()]
    failed = [name for name, outcome in parts.items() if outcome["status"] == FAILED]
    lines += ["", f"FAILED: {'; '.join(failed)}" if failed else "No part failed."]
    for name, outcome in parts.items():
        try:
            section = list(_section(name, outcome["result"]))
        except (
            Exception
        ) as error:  # of a part that ended in the middle, say: the others are to be shown
            section = [f"cannot be shown: {type(error).__name__}: {error}"]
        problems = [f"  ! {_cut(problem)}" for problem in outcome["problems"]]
        if section or problems:
            lines += ["", name, "-" * len(name), *section, *problems]
    return "\n".join(lines)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def _environment(parts: dict[str, Any]) -> Iterator[str]:
    found = parts.get("environment", {}).get("result", {})
    if "name" in found:
        memory = f", {found['memory, GiB']:.0f} GiB" if "memory, GiB" in found else ""
        driver = f", driver {found['driver']}, CUDA {found['cuda']}" if "driver" in found else ""
        yield f"{found['name']}{memory}{driver}, Python {found['python']}"
        names = (
            "torch",
            "transformers",
            "triton",
            "fla-core",
            "flash-attn",
            "causal-conv1d",
            "mamba-ssm",
        )
        yield ", ".join(f"{name} {found.get(name) or 'absent'}" for name in names)


def _section(name: str, found: dict[str, Any]) -> Iterator[str]:
    if "size" in found:
        yield from _speed(found)
    yield from found.get("output", ())


def _speed(found: dict[str, Any]) -> Iterator[str]:
    size, real = found["size"], found.get("real tokens")
    kernels = found.get("flash", "not run")
    yield f"{size['model_type']}, {found['parameters'] / 1e9:.2f} B parameters, {found['dtype']}; {kernels}"
    if real:
        ratio = f"padded / real: {found['padded tokens'] / real:.2f}"
        yield f"{size['batches']} batches of {size['documents']} documents, {real} tokens; {ratio}"
    checked = found.get("checked", {})
    if checked:
        control = checked["control: documents that see each other"]
        errors = [error for error in checked["arms"].values() if isinstance(error, float)]
        yield (
            f"{checked['measure']}: at most {max(errors, default=0):.1e} in all arms, allowed "
            f"{checked['bound']:.1e}; {control:.1e} where documents see each other"
        )
    for kind, title in KINDS.items():
        if kind in found:
            yield from _race(found[kind], title)


def _race(found: dict[str, Any], title: str) -> Iterator[str]:
    yield ""
    if "left out" in found:
        yield f"{title}: left out, {found['left out']}"
        return
    more = (
        f", {found['optimizer']}{', checkpointing' if found['checkpointing'] else ''}"
        if "optimizer" in found
        else ""
    )
    yield f"{title}{more}, {found['rounds']} interleaved rounds"
    others = ("speed_of_padded", "speed of stock packed flash")
    yield f"{'arm':<32}{'real tokens/s':>28}{'peak MiB':>11}" + "".join(
        f"{other.replace('_', ' '):>30}" for other in others
    )
    for arm, cell in found["arms"].items():
        if cell["tokens_per_second"] is None:
            yield f"{arm:<32}  {_cut(cell['failed'] or 'not timed')}"
            continue
        ratios = ("-" if cell[other] is None else Spread(**cell[other]) for other in others)
        speed = f"{Spread(**cell['tokens_per_second'])!s:>28}{mebibytes(cell['peak_bytes']):>11}"
        yield f"{arm:<32}{speed}" + "".join(f"{ratio!s:>30}" for ratio in ratios)
