"""A benchmark in words for a terminal, as a page, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from autopack.bench.batches import ARMS, BASELINE, GROUPED, STOCK_ROW
from autopack.bench.race import CONFIDENCE, FASTER, LEAST, NOISY, SLOWER, TOO_FEW
from autopack.bench.result import Outcome, Result
from autopack.pages import figure, parts, theme
from autopack.pages.figure import Bar, Bars

BUSY = 0.5
"""A load per core above this, before anything was timed, is somebody else's."""
MIB = 2**20
HEAD = ["", "real tokens/s", "speed of padded", "peak MiB"]
_ARM, _SPEED, _RATIO, _PEAK = 26, 24, 20, 9


def write_table(result: Result, width: int = 80) -> str:
    """The result as text: head and notes wrapped at `width`, the table of 79 columns."""

    def wrapped(text: str, hang: str = "") -> str:
        return textwrap.fill(text, width, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False)

    rows = [_line(row) for row in [HEAD, *rows_of(result)]]
    return "\n".join([*map(wrapped, head_of(result)), "", *rows, "", *(wrapped(n, "  ") for n in notes_of(result))])


def head_of(result: Result) -> list[str]:
    """What was timed, on what, and of what documents: a line each."""
    return [_about(result), _machine(result), _documents(result)]


def _about(result: Result) -> str:
    model = result.model
    work = "forward passes, no gradients" if result.settings.forward else "training steps: forward, backward, AdamW"
    millions = model["parameters"] / 1e6
    size = f"{millions / 1e3:.1f} B" if millions >= 1e3 else f"{millions:.{1 if millions < 10 else 0}f} M"
    return f"{model['name']}, {size} parameters, {model['dtype']}, {model['attention']}; {work}"


def _machine(result: Result) -> str:
    where, model = result.origin, result.model
    cores = f"{where['device']}, {where['cores']} cores, {_counted(where['threads'], 'thread')}"
    named = f"{model['gpu']} (host: {cores})" if "gpu" in model else cores
    loads = [where["load at start"], where["load at end"]]
    said = "" if None in loads else f", load {loads[0]:.1f} before and {loads[1]:.1f} after"
    return f"{named}{said}; torch {where['torch']}, transformers {where['transformers']}"


def _documents(result: Result) -> str:
    batches, lengths = result.documents, [length for batch in result.documents for length in batch]
    padding = {name: 1 - result.tokens / columns for name, columns in result.columns.items()}
    count = f"{_counted(len(batches), 'batch', 'batches')} of {len(batches[0])}"
    return (
        f"{_counted(len(lengths), 'document')} of {min(lengths):,} to {max(lengths):,} tokens "
        f"({result.model['lengths']}), {result.tokens:,} tokens in {count}; padding {padding['as drawn']:.0%}, grouped "
        f"by length {padding['grouped']:.0%}; in batches of all documents {result.padding_of_all:.0%}"
    )


def rows_of(result: Result) -> list[list[str]]:
    """The cells of the table; an arm that was not timed has its name, and why."""
    rows = []
    for outcome in result.outcomes:
        ratio, says = result.ratio(outcome), result.says(outcome)
        said = "1" if outcome.arm == BASELINE else "-" if ratio is None else str(ratio)
        said = says if says in (NOISY, TOO_FEW) else said
        cells = [outcome.failed or "not timed"]
        if outcome.timed:
            cells = [str(result.speed(outcome)), said, mebibytes(outcome.peak)]
        rows.append([outcome.arm.name, *cells])
    return rows


def _line(row: list[str]) -> str:
    if len(row) < len(HEAD):
        return f"{row[0]:<{_ARM}}" + textwrap.shorten(row[1], 79 - _ARM, placeholder=" ...")
    # A cell as wide as its column keeps a space before it.
    return f"{row[0]:<{_ARM}}{' ' + row[1]:>{_SPEED}}{' ' + row[2]:>{_RATIO}}{' ' + row[3]:>{_PEAK}}"


def mebibytes(count: int | None) -> str:
    """A number of bytes in MiB, in three digits or all of a greater number; "-" for None."""
    if count is None:
        return "-"
    found = count / MIB
    return f"{found:,.{0 if found >= 100 else 1 if found >= 10 else 2}f}"


def notes_of(result: Result) -> Iterator[str]:
    """What has to be said of the numbers, and how they came about."""
    yield from (f"WRONG: {_name(o)} {_off(o, result)}; please report it" for o in result.wrong)
    reference, stock = result.outcomes[0].loss, result.outcomes[ARMS.index(STOCK_ROW)]
    equal = [o for o in result.outcomes if result.same_loss(o) and o.arm not in (BASELINE, STOCK_ROW)]
    if equal and not result.wrong:
        others = f"All arms that ran beside {_name(stock)}"
        yield f"{others} have padded's loss on the same documents: {reference:.4f}, within {result.tolerance:g} of it."
    if result.same_loss(stock) is False:
        yield f"{_name(stock)} LEAKS: it {_off(stock, result)}, as documents in a row see each other."
    elif result.same_loss(stock):
        yield f"{_name(stock)}: no leak shows in the loss of this call; `autopack audit` tries others."
    noisy = [o for o in result.outcomes if o.timed and result.says(o) == NOISY]
    if noisy:
        said = ", ".join(f"{_name(o)} {result.ratio(o)}" for o in noisy)
        yield f"Too noisy to tell, since 1 lies in the interval: {said}."
    if len(result.documents) == 1:
        yield "In a single batch there is nothing to group by length: give more time (--seconds) or shorter documents."
    for outcome in result.outcomes:
        if outcome.note is not None:
            yield f"{_name(outcome)}: {outcome.note}."
        if outcome.failed is not None and len(outcome.failed) > 79 - _ARM:
            yield f"{_name(outcome)}: {outcome.failed}"
    yield _method(result)
    where = result.origin
    if where["load at start"] is not None and where["load at start"] > BUSY * where["cores"]:
        yield (
            f"The machine was busy before this began (load {where['load at start']:.1f} on {where['cores']} cores): "
            "arms ran in turns, so ratios suffer least, but none of these speeds is that of a quiet machine."
        )


def _method(result: Result) -> str:
    if not (rounds := result.rounds):
        return "Nothing was timed."
    enough = rounds >= LEAST
    interval = f"that holds it with {CONFIDENCE:.0%} confidence" if enough else "from the least to the greatest"
    few = "" if enough else f"; fewer than {LEAST} rounds cannot tell a difference from noise"
    peak = "Peak memory is torch's, of the largest batch"
    return f"Median of {_counted(rounds, 'round')} in turns, and an interval {interval}{few}. {peak}."


def _off(outcome: Outcome, result: Result) -> str:
    reference: Any = result.outcomes[0].loss
    difference: Any = outcome.difference
    return f"has a loss of {outcome.loss:.4f}, off padded's {reference:.4f} by {100 * difference:.2g}%"


def _name(outcome: Outcome) -> str:
    return f'"{outcome.arm.name}"'


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def draw(result: Result) -> Any:
    """Draw the result: bars are medians, lines the intervals that hold them."""
    title, *below = head_of(result)
    return figure.picture(charts(result), title, "\n".join(below))


def body(result: Result) -> str:
    """The result as HTML without scripts or outside references; figures where matplotlib is installed."""
    return parts.joined(
        parts.lines(head_of(result)),
        parts.table(HEAD, rows_of(result), "<>>>"),
        figure.figures(charts(result)),
        parts.lines(notes_of(result)),
    )


def charts(result: Result) -> list[Bars]:
    """Bars of speed with their ratios to padded, and bars of memory where any was measured."""
    speeds, memory = [], []
    for outcome in result.outcomes:
        name, form = outcome.arm.name, _looks(result, outcome)
        if outcome.timed:
            speed = result.speed(outcome)
            interval = (speed.low, speed.high)
            speeds.append(Bar(name, speed.median, _label(result, outcome), interval=interval, **form))
        else:
            said = textwrap.shorten(outcome.failed or "not timed", 50, placeholder=" ...")
            speeds.append(Bar(name, None, said))
        peak = None if outcome.peak is None else outcome.peak / MIB
        memory.append(Bar(name, peak, mebibytes(outcome.peak), **form))
    caption = f"Real tokens per second and × speed of padded, {result.rounds} rounds"
    found = [Bars(caption, speeds, numbered=True, width=7)]
    if any(bar.value is not None for bar in memory):
        found.append(Bars(f"Peak memory{'' if result.settings.forward else ' of a step'}, MiB", memory, width=4.6))
    return found


def _leaks(result: Result, outcome: Outcome) -> bool:
    return outcome.arm == STOCK_ROW and result.same_loss(outcome) is False


def _label(result: Result, outcome: Outcome) -> str:
    ratio, says = result.ratio(outcome), result.says(outcome)
    said = "" if outcome.arm == BASELINE or ratio is None else f"× {ratio}" if says in (FASTER, SLOWER) else says
    wrong = "LEAKS" if _leaks(result, outcome) else "WRONG LOSS" if outcome in result.wrong else ""
    return "  ".join(part for part in (said, wrong) if part)


def _looks(result: Result, outcome: Outcome) -> dict[str, Any]:
    """Colour and hatching of an arm's bars; those of one that leaks are hatched."""
    leaks = _leaks(result, outcome)
    color = theme.GROUPED if outcome.arm.form == GROUPED else theme.PADDED
    if outcome.arm.enabled:
        color = theme.PACKED
    elif outcome.arm == STOCK_ROW:
        color = theme.LEAKS if leaks else theme.STOCK
    return {"color": color, "hatched": leaks}
