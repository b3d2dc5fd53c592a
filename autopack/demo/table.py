"""The result of the demo as plain text."""

from __future__ import annotations

import platform

from autopack.demo.training import Comparison
from autopack.version import __version__


def write_table(result: Comparison) -> str:
    """The whole result: what was trained, its cost, its losses, and what documents in one row do to each other."""
    return "\n\n".join(block(result) for block in (_setting, _speed, _losses, _leak, verdict))


def verdict(result: Comparison) -> str:
    """One sentence: faster, with the same losses and without a leak, or what went wrong."""
    if result.succeeded:
        return f"Packed rows: {result.speedup:.1f} times the tokens per second, the same losses, no leak."
    differ = "the losses of padded and packed training differ by more than rounding"
    wrong = "documents in a row of the enabled model change each other" if result.losses_equal else differ
    return f"FAILED: {wrong}. Please report this with the output of `autopack doctor`."


def _setting(result: Comparison) -> str:
    settings, lengths = result.settings, result.lengths
    python = ".".join(platform.python_version_tuple()[:2])
    half, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    return f"""\
autopack {__version__} demo: the same training with padded batches and with packed rows

  text      {result.texts:,} documents from the documentation of Python {python}, {sum(lengths):,} tokens
            lengths: median {half}, one in ten above {most}, longest {lengths[-1]}
  model     Llama, {result.parameters / 1e6:.1f} M parameters, sdpa, float32, {result.threads} CPU threads
  training  {settings.steps} steps of {settings.batch_size} documents, both ways in the same order and from seed \
{settings.seed}"""


def _speed(result: Comparison) -> str:
    columns = ((result.padded_tokens, result.padded_seconds), (result.real_tokens, result.packed_seconds))
    rows = {
        "": ["padded batch", "packed row"],
        "tokens computed": [f"{tokens:,}" for tokens, _ in columns],
        "of these padding": [f"{1 - result.real_tokens / tokens:.1%}" for tokens, _ in columns],
        "seconds of training": [f"{seconds:.1f}" for _, seconds in columns],
        "real tokens per second": [f"{result.real_tokens / seconds:,.0f}" for _, seconds in columns],
    }
    lines = [f"  {name:<24}{padded:>14}{packed:>14}" for name, (padded, packed) in rows.items()]
    lines[-1] += f"   {result.speedup:.2f}x"
    return "\n".join(["Speed: padding costs time and teaches nothing; packed rows have none.", *lines])


def _losses(result: Comparison) -> str:
    last = len(result.padded_losses) - 1
    lines = [
        "Loss: every optimizer step sees the same documents, so the losses must be the same.",
        f"  {'step':<10}{'padded batch':>14}{'packed row':>14}{'relative difference':>24}",
    ]
    for step in sorted({0, min(1, last), *(last * part // 4 for part in range(1, 5))}):
        values = f"{result.padded_losses[step]:>14.6f}{result.packed_losses[step]:>14.6f}"
        lines.append(f"  {step + 1:<10}{values}{result.loss_differences[step]:>24.1e}")
    equal = "equal within fp32 rounding" if result.losses_equal else "NOT equal within fp32 rounding"
    lines.append(f"  largest difference in {last + 1} steps: {max(result.loss_differences):.1e}, {equal}")
    return "\n".join(lines)


def _leak(result: Comparison) -> str:
    lines = [
        "Leak: how far the logits of a document move when a neighbour in its row is replaced, and how far they are",
        "from those of the document alone (largest values, in standard deviations of the logits).",
        f"  {'model(input_ids, position_ids)':<34}{'replaced neighbour':>20}{'packed and alone':>20}",
    ]
    for name, leak in (("stock transformers", result.stock_leak), ("autopack.enable(model)", result.leak)):
        state = "none within fp32 rounding" if leak.exact else "LEAKS"
        lines.append(f"  {name:<34}{leak.influence_of_others:>20.1e}{leak.against_alone:>20.1e}   {state}")
    return "\n".join(lines)
