"""The results of a demo as plain text."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from autopack.demo.arms import Comparison
from autopack.demo.training import LlamaComparison
from autopack.version import __version__

PYTHON = ".".join(platform.python_version_tuple()[:2])


def write_table(result: LlamaComparison) -> str:
    """The result of a small Llama: what was trained, cost, losses, and what documents in one row do to each other."""
    settings, lengths = result.settings, result.lengths
    half, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    setting = [
        f"autopack {__version__} demo: the same training with padded batches and with packed rows",
        "",
        f"  text      {result.texts:,} documents from the documentation of Python {PYTHON}, {sum(lengths):,} tokens",
        f"            lengths: median {half}, one in ten above {most}, longest {lengths[-1]}",
        f"  model     Llama, {size(result)}",
        f"  training  {settings.steps} steps of {settings.batch_size} documents, both ways in the same order and from "
        f"seed {settings.seed}",
    ]
    leak = [
        "Leak: how far the logits of a document move when a neighbour in its row is replaced, and how far they are",
        "from those of the document alone (largest values, in standard deviations of the logits).",
        f"  {'model(input_ids, position_ids)':<34}{'replaced neighbour':>20}{'packed and alone':>20}",
    ]
    for name, found in (("stock transformers", result.stock_leak), ("autopack.enable(model)", result.leak)):
        state = "none within float32 rounding" if found.exact else "LEAKS"
        leak.append(f"  {name:<34}{found.influence_of_others:>20.1e}{found.against_alone:>20.1e}   {state}")
    rates = [f"{result.real_tokens / seconds:,.0f}" for seconds in result.seconds["training"].values()]
    of_speed = [*speed(result), columns("real tokens per second", rates)]
    return text(setting, of_speed, losses(result), leak, [verdict(result)])


def verdict(result: LlamaComparison) -> str:
    """One sentence: faster, with the same losses and without a leak, or what went wrong."""
    if not result.losses_equal:
        return failed("the losses of padded and packed training differ by more than rounding")
    if not result.leak.exact:
        return failed("documents in a row of the enabled model change each other")
    return f"Packed rows: {result.speedup('packed'):.1f} times the tokens per second, the same losses, no leak."


def size(result: Comparison) -> str:
    return f"{result.parameters / 1e6:.1f} M parameters, sdpa, float32, {result.threads} CPU threads"


def losses(result: Comparison) -> list[str]:
    """The losses of some steps, of all if there are few, and how far any are apart."""
    last = len(result.loss_differences) - 1
    shown = range(last + 1) if last < 8 else sorted({0, 1, *(last * part // 4 for part in range(1, 5))})
    lines = [
        "Loss: every optimizer step sees the same documents, so the losses must be the same.",
        columns("step", [*result.losses, "difference"]),
    ]
    for step in shown:
        values = [f"{losses[step]:.6f}" for losses in result.losses.values()]
        lines.append(columns(str(step + 1), [*values, f"{result.loss_differences[step]:.1e}"]))
    most = max(result.loss_differences)
    lines.append(f"  largest relative difference in {last + 1} steps: {most:.1e}, {equal(result.losses_equal)}")
    return lines


def speed(result: Comparison) -> list[str]:
    """What was computed and how long it took; the tokens are those of the first that was timed."""
    tokens = [result.padded_tokens if way == "padded" else result.real_tokens for way in result.losses]
    lines = [
        "Speed: padding costs time and teaches nothing; packed rows have none.",
        columns("", result.losses),
        columns("tokens computed", [f"{count:,}" for count in tokens]),
        columns("of these padding", [f"{1 - result.real_tokens / count:.1%}" for count in tokens]),
    ]
    for timed, seconds in result.seconds.items():
        lines.append(columns(f"seconds of {timed}", [f"{each:.1f}" for each in seconds.values()]))
        lines.append(columns("  relative speed", [f"{result.speedup(way, timed):.2f}x" for way in seconds]))
    return lines


def columns(name: str, values: Iterable[str]) -> str:
    return f"  {name:<24}" + "".join(f"{value:>14}" for value in values)


def equal(equal: bool) -> str:
    return "equal within float32 rounding" if equal else "NOT equal within float32 rounding"


def failed(wrong: str) -> str:
    return f"FAILED: {wrong}. Please report this with the output of `autopack doctor`."


def text(*blocks: Iterable[str]) -> str:
    return "\n\n".join(map("\n".join, blocks))
