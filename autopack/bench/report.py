"""A benchmark in words for a terminal, as a page, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from autopack.bench.batches import BASELINE, GROUPED, STOCK_ROW
from autopack.bench.compare import Comparison
from autopack.bench.contest import Outcome
from autopack.bench.race import CONFIDENCE, LEAST, NOISY, TOO_FEW
from autopack.pages import figure
from autopack.pages.figure import Bar, Bars, Report, Table

MIB = 2**20
HEAD = ["", "real tokens/s", "speed of padded", "peak MiB"]
SIDES = "<>>>"


def report_of(result: Comparison) -> Report:
    """Return the result in words and figures: bars are medians, lines the intervals that hold them."""
    tables = [Table([HEAD, *rows_of(result)], SIDES)]
    return Report(head_of(result), tables, charts(result), [*notes_of(result)])


def head_of(result: Comparison) -> list[str]:
    """Return what was timed, on what, and of what documents: a line each."""
    model, where = result.model, result.origin
    work = "forward passes, no gradients" if result.settings.forward else "training steps: forward, backward, AdamW"
    device = f"{where['device']}, {where['cores']} cores, threads: {where['threads']}"
    device = f"{model['gpu']} (host: {device})" if "gpu" in model else device
    loads = [where["load at start"], where["load at end"]]
    load = "" if None in loads else f", load {loads[0]:.1f} before and {loads[1]:.1f} after"
    batches, lengths = result.documents, [length for batch in result.documents for length in batch]
    tokens = sum(lengths)
    padding = {name: f"{1 - tokens / columns:.0%}" for name, columns in result.columns.items()}
    return [
        f"{model['name']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']}, {model['attention']}; "
        f"{work}",
        f"{device}{load}; torch {where['torch']}, transformers {where['transformers']}",
        f"{len(batches)} x {len(batches[0])} documents of {min(lengths):,} to {max(lengths):,} tokens "
        f"({model['lengths']}), {tokens:,} tokens; padding {padding['as drawn']}, "
        f"grouped by length {padding['grouped']}",
    ]


def rows_of(result: Comparison) -> list[list[str]]:
    """Return the cells of the table; an arm that was not timed has its name, and why."""
    rows = []
    for outcome in result.outcomes:
        cells = [outcome.failed or "not timed"]
        if outcome.timed:
            ratio = "1" if outcome.arm == BASELINE else "-" if outcome.ratio is None else str(outcome.ratio)
            said = outcome.says if outcome.says in (NOISY, TOO_FEW) else ratio
            cells = [str(outcome.speed), said, mebibytes(outcome.peak)]
        rows.append([outcome.arm.name, *cells])
    return rows


def mebibytes(count: int | None) -> str:
    """Return a number of bytes in MiB; "-" for None."""
    return "-" if count is None else f"{count / MIB:,.1f}"


def notes_of(result: Comparison) -> Iterator[str]:
    """Yield what has to be said of the numbers, and how they came about."""
    first = result.outcomes[0]
    yield from (f"WRONG: {_name(each)} {_off(each)}; please report it" for each in result.wrong)
    if not result.wrong and any(o.same_loss for o in result.outcomes if o.arm not in (BASELINE, STOCK_ROW)):
        others = f'All arms that ran beside "{STOCK_ROW.name}" have padded\'s loss on the same documents'
        yield f"{others}: {first.loss:.4f}, within {first.tolerance:g} of it."
    for outcome in result.outcomes:
        if outcome.leaks:
            yield f"{_name(outcome)} LEAKS: it {_off(outcome)}, as documents in a row see each other."
        elif outcome.arm == STOCK_ROW and outcome.same_loss:
            yield f"{_name(outcome)}: no leak shows in the loss of this call; `autopack audit` tries others."
    noisy = [f"{_name(each)} {each.ratio}" for each in result.outcomes if each.timed and each.says == NOISY]
    if noisy:
        yield f"Too noisy to tell, since 1 lies in the interval: {', '.join(noisy)}."
    if len(result.documents) == 1:
        yield "In a single batch there is nothing to group by length: give more time (--seconds) or shorter documents."
    for outcome in result.outcomes:
        if outcome.note is not None:
            yield f"{_name(outcome)}: {outcome.note}."
    enough = result.rounds >= LEAST
    interval = f"that holds it with {CONFIDENCE:.0%} confidence" if enough else "from the least to the greatest"
    few = "" if enough else f"; fewer than {LEAST} rounds cannot tell a difference from noise"
    yield (
        f"Rounds in turns: {result.rounds}. Shown are their median and an interval {interval}{few}. "
        "Peak memory is torch's, of the largest batch."
        if result.rounds
        else "Nothing was timed."
    )


def _off(outcome: Outcome) -> str:
    wanted: Any = outcome.baseline
    difference: Any = outcome.difference
    return f"has a loss of {outcome.loss:.4f}, off padded's {wanted.loss:.4f} by {100 * difference:.2g}%"


def _name(outcome: Outcome) -> str:
    return f'"{outcome.arm.name}"'


def charts(result: Comparison) -> list[Bars]:
    """Return bars of speed with their ratios to padded, and bars of memory where any was measured."""
    speeds, memory = [], []
    for outcome, (name, *cells) in zip(result.outcomes, rows_of(result), strict=True):
        color = _color(outcome)
        if outcome.timed:
            speed = outcome.speed
            wrong = "  LEAKS" if outcome.leaks else "  WRONG LOSS" if outcome.wrong else ""
            speeds.append(Bar(name, speed.median, cells[1] + wrong, color, (speed.low, speed.high)))
        else:
            speeds.append(Bar(name, None, textwrap.shorten(cells[0], 50, placeholder=" ...")))
        if outcome.peak is not None:
            memory.append(Bar(name, outcome.peak / MIB, mebibytes(outcome.peak), color))
    found = [Bars(f"Real tokens per second and speed of padded, {result.rounds} rounds", speeds)]
    if memory:
        found.append(Bars(f"Peak memory{'' if result.settings.forward else ' of a step'}, MiB", memory))
    return found


def _color(outcome: Outcome) -> str:
    if outcome.arm.enabled:
        return figure.PACKED
    if outcome.arm.packed:
        return figure.LEAKS if outcome.leaks else figure.STOCK
    return figure.GROUPED if outcome.arm.form == GROUPED else figure.PADDED
