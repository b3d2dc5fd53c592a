"""The result of the demo as plain text."""

from __future__ import annotations

from autopack import __version__
from autopack.demo.training import Comparison, python_version

__all__ = ["verdict", "write_table"]


def write_table(result: Comparison) -> str:
    """The whole result: what was trained, its cost, its losses, and what documents in one row do to each other."""
    blocks = [_setting(result), _speed(result), _losses(result), _leak(result), verdict(result)]
    return "\n\n".join(blocks)


def verdict(result: Comparison) -> str:
    """One sentence: faster, with the same losses and without a leak, or what went wrong."""
    if not result.losses_equal:
        return (
            "FAILED: the losses of padded and packed training differ by more than rounding. "
            "Please report this with the output of `autopack doctor`."
        )
    if not result.leak.exact:
        return (
            "FAILED: documents in a row of the enabled model change each other. "
            "Please report this with the output of `autopack doctor`."
        )
    return f"Packed rows: {result.speedup:.1f} times the tokens per second, the same losses, no leak."


def _setting(result: Comparison) -> str:
    settings, lengths = result.settings, result.lengths
    return "\n".join(
        [
            f"autopack {__version__} demo: the same training with padded batches and with packed rows",
            "",
            f"  text      {result.texts:,} documents from the documentation of Python {python_version()}, "
            f"{sum(lengths):,} tokens",
            f"            lengths: median {lengths[len(lengths) // 2]}, one in ten above "
            f"{lengths[len(lengths) * 9 // 10]}, longest {lengths[-1]}",
            f"  model     Llama, {result.parameters / 1e6:.1f} M parameters, sdpa, float32, "
            f"{result.threads} CPU threads",
            f"  training  {settings.steps} steps of {settings.batch_size} documents, both ways in the same order and "
            f"from seed {settings.seed}",
        ]
    )


def _speed(result: Comparison) -> str:
    columns = [("padded batch", result.padded_tokens, result.padded_seconds)]
    columns.append(("packed row", result.real_tokens, result.packed_seconds))
    rows = [
        ("", [name for name, _, _ in columns], ""),
        ("tokens computed", [f"{tokens:,}" for _, tokens, _ in columns], ""),
        ("of these padding", [f"{1 - result.real_tokens / tokens:.1%}" for _, tokens, _ in columns], ""),
        ("seconds of training", [f"{seconds:.1f}" for _, _, seconds in columns], ""),
        (
            "real tokens per second",
            [f"{result.real_tokens / seconds:,.0f}" for _, _, seconds in columns],
            f"{result.speedup:.2f}x",
        ),
    ]
    lines = [f"  {name:<24}{cells[0]:>14}{cells[1]:>14}   {note}".rstrip() for name, cells, note in rows]
    return "\n".join(["Speed: padding costs time and teaches nothing; packed rows have none.", *lines])


def _losses(result: Comparison) -> str:
    last = len(result.padded_losses) - 1
    shown = sorted({0, 1, *(last * part // 4 for part in range(1, 5))} & set(range(last + 1)))
    lines = [f"  {'step':<10}{'padded batch':>14}{'packed row':>14}{'relative difference':>24}"]
    for step in shown:
        values = f"{result.padded_losses[step]:>14.6f}{result.packed_losses[step]:>14.6f}"
        lines.append(f"  {step + 1:<10}{values}{result.loss_differences[step]:>24.1e}")
    equal = "equal within fp32 rounding" if result.losses_equal else "NOT equal within fp32 rounding"
    lines.append(f"  largest difference in {last + 1} steps: {max(result.loss_differences):.1e}, {equal}")
    return "\n".join(["Loss: every optimizer step sees the same documents, so the losses must be the same.", *lines])


def _leak(result: Comparison) -> str:
    names = ("stock transformers", "autopack.enable(model)")
    lines = [f"  {'model(input_ids, position_ids)':<34}{'replaced neighbour':>20}{'packed and alone':>20}"]
    for name, leak in zip(names, (result.stock_leak, result.leak), strict=True):
        state = "none within fp32 rounding" if leak.exact else "LEAKS"
        lines.append(f"  {name:<34}{leak.influence_of_others:>20.1e}{leak.against_alone:>20.1e}   {state}")
    return "\n".join(
        [
            "Leak: how far the logits of a document move when a neighbour in its row is replaced, and how far they are",
            "from those of the document alone (largest values, in standard deviations of the logits).",
            *lines,
        ]
    )
