"""The gain of packing on a data set, from lengths: padding, tokens and attention of padded batches
and of packed rows.

Nothing is trained and nothing is timed: only lengths are counted, and costs follow from a
`CostModel`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from autopack.bench.predicted import (
    DEVICES,
    EstimatedArm,
    EstimatedSteps,
    PredictedArm,
    cost_of_steps,
    hidden_size,
    layers_of,
    predict,
)
from autopack.bench.subjects import documents_of, lengths_of
from autopack.packing.checks import (
    Counts,
    Overflow,
    check_in,
    check_options,
    fit,
    nothing_left,
    read,
)
from autopack.packing.plans import Strategy, groups_of, plan
from autopack.packing.strategies import CostModel
from autopack.pages.figure import (
    GROUPED,
    PACKED,
    PADDED,
    Bar,
    Bars,
    Chart,
    Histogram,
    Report,
    Sections,
    Table,
)

MEGABATCHES = 50
"""Batches among which transformers groups documents by length."""


@dataclass(frozen=True, repr=False)
class Estimate(Report):
    """Estimated gain of packing a data set, in figures.

    `str()` is a table, `plot()` a picture, and `found[name]` the packed arm of that name.

    Attributes:
        lengths: (documents,) int64, tokens of each, after what `overflow` did.
        counts: what was given, and what was done to documents longer than a row.
        max_length: the most tokens of a row.
        cost: the cost model.
        baseline: padded batches in random order, which the others are compared with.
        padded: padded batches of all sizes, in both orders.
        packed: the mini-batches of `PackingCollator`, and the plans of all strategies.
        steps: optimizer steps of several ranks, if `max_tokens` was given.
        on: the GPU that was asked for, and `predicted` the arms on it.
    """

    lengths: np.ndarray
    counts: Counts
    max_length: int
    cost: CostModel
    baseline: EstimatedArm
    padded: tuple[EstimatedArm, ...]
    packed: tuple[EstimatedArm, ...]
    steps: tuple[EstimatedSteps, ...] = ()
    on: str | None = None
    predicted: tuple[PredictedArm, ...] = ()

    def __getitem__(self, name: str) -> EstimatedArm:
        found = {arm.name: arm for arm in self.packed}
        if name not in found:
            raise KeyError(f"{name!r}: wanted one of {', '.join(found)}")
        return found[name]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data; the lengths as their quantiles and mean."""
        shares = {"min": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "max": 1}
        quantiles = np.quantile(self.lengths, list(shares.values())).tolist()
        spread = {**dict(zip(shares, quantiles, strict=True)), "mean": float(self.lengths.mean())}
        return asdict(self) | {"lengths": spread}

    def _sections(self) -> Sections:
        counts, cost = self.counts, self.cost
        spread = ", ".join(
            f"{name} {value:,.0f}" for name, value in self.as_dict()["lengths"].items()
        )
        head = [f"{counts.documents:,} documents, {counts.tokens:,} tokens: {spread}"]
        if over := ", ".join(f"{value:,} {name}" for name, value in counts.overflow.items()):
            head.append(f"longer than {self.max_length:,} tokens: {over}")
        pair = f"1 / {1 / cost.quadratic:,.0f}" if cost.quadratic else "nothing"
        notes = [
            f"Rows of plans hold at most {self.max_length:,} tokens and count as padded to the "
            "longest; attention stays inside documents. Speed-up: cost of the padded batches over "
            f"cost of the rows, where a column costs {cost.linear:g} and a pair of columns {pair}. "
            "Nothing was timed."
        ]
        if any("groups" in arm.name for arm in self.packed):
            notes.append(
                "In rows of groups, what documents of one group begin with is computed once."
            )
        return Sections(head, self._tables(), self._charts(), notes)

    def _tables(self) -> list[Table]:
        """Return tables: padded batches, packed rows, and steps and a GPU where asked for."""
        baseline = f"padded batches of {self.baseline.batch_size} in random order"
        tables = [
            Table.of(
                "documents per batch|random|grouped by length",
                "{0.batch_size}|{0.padding:.1%}|{1.padding:.1%}",
                self.padded[::2],
                self.padded[1::2],
                sides="<>>",
                caption="padded batches: share of padding",
            ),
            Table.of(
                "|rows|padding|tokens saved|attention saved|speed-up",
                "{0.label}|{0.rows:,}|{0.padding:.2%}|{0.tokens_saved:.1%}|"
                "{0.attention_saved:.1%}|{0.speedup:.2f} x",
                self._compared[1:],
                sides="<>>>>>",
                caption=f"packed rows, against {baseline}",
            ),
        ]
        if self.steps:
            tables.append(
                Table.of(
                    "|micro-batches|slowest rank|speed-up",
                    "{0.name}|{0.micro_batches:.1f}|{0.slowest:.2f}|{0.speedup:.2f} x",
                    self.steps,
                    sides="<>>>",
                    caption="optimizer steps, which wait for the slowest rank",
                )
            )
        if self.on:
            hidden = hidden_size(self.cost)
            tables.append(
                Table.of(
                    "|bound by|tokens/s|speed-up",
                    "{0.name}|{0.bound_by}|{0.tokens_per_second:,.0f}|{0.speedup:.2f} x",
                    self.predicted,
                    sides="<<>>",
                    caption=f"predicted, not measured: a transformer of hidden size {hidden:,} and "
                    f"{layers_of(hidden)} layers on one {self.on}",
                )
            )
        return tables

    def _charts(self) -> list[Chart]:
        colors = {"random": PADDED, "grouped": GROUPED, None: PACKED}
        bars = [
            Bar(arm.label, arm.speedup, f"{arm.speedup:.2f} x", colors[arm.order])
            for arm in self._compared
        ]
        return [
            Histogram(
                f"Tokens of documents (dashed: mean {self.lengths.mean():,.0f})", self.lengths
            ),
            Bars(f"Expected speed, rows of {self.max_length:,}", bars),
        ]

    @property
    def _compared(self) -> list[EstimatedArm]:
        """Padded batches of the baseline's size in both orders, then all packed arms."""
        size = self.baseline.batch_size
        return [*(arm for arm in self.padded if arm.batch_size == size), *self.packed]


def _grouped_by_length(shuffled: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the lengths in the order that transformers' `group_by_length` gives them.

    They are sorted from long to short within groups of up to `MEGABATCHES` batches.
    """
    size = batch_size * max(1, min(len(shuffled) // (batch_size * 4), MEGABATCHES))
    whole = len(shuffled) // size * size
    grouped = -np.sort(-shuffled[:whole].reshape(-1, size), axis=1).ravel()
    return np.concatenate([grouped, -np.sort(-shuffled[whole:])])


def _tokens_and_pairs(lengths: np.ndarray, batch_size: int) -> tuple[int, int]:
    """Return how many tokens, with padding, and pairs within rows padded batches compute.

    `lengths` are in the order in which documents make batches.
    """
    starts = np.arange(0, len(lengths), batch_size)
    widths = np.repeat(np.maximum.reduceat(lengths, starts), np.diff(starts, append=len(lengths)))
    return int(widths.sum()), int((widths * widths).sum())


def estimate(
    data: Any,
    max_length: int = 4096,
    *,
    batch_size: int = 8,
    batch_sizes: Collection[int] = (2, 4, 8, 16, 32, 64),
    strategies: Collection[Strategy] = get_args(Strategy),
    overflow: Overflow = "truncate",
    cost: CostModel | None = None,
    column: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    groups: str | bool = False,
    max_tokens: int | None = None,
    ranks: int = 1,
    accumulation: int = 1,
    on: str | None = None,
) -> Estimate:
    """Return the estimated gain of packing a data set, before any training.

    The expected speed-up is a ratio of costs by `cost`, summed over one epoch: each column that is
    computed costs `linear`, and each pair of columns of one padded row, or of one packed document,
    `quadratic`. It is what a device gives that is busy all the time, with attention that skips what
    packing masks; kernels that are launched for small batches gain more, and input that is waited
    for gains nothing.

    Args:
        data: tokens of each document, as a list, array or tensor of ints; a `datasets.Dataset` or
            list of mappings; or the path of a `.json`, `.jsonl`, `.npy` or `.parquet` file of
            lengths or examples, or of a dataset that `save_to_disk` wrote.
        max_length: the most tokens of a packed row, and of a document.
        batch_size, batch_sizes: documents of a padded batch, for the baseline and for the padding
            by batch size.
        strategies: see `autopack.packing.plan`.
        overflow: what becomes of documents longer than `max_length`, in padded batches too; see
            there.
        cost: what tokens and attention cost; by default at a hidden size of 4096.
        column: of the data: ints are lengths, lists of ints tokens; text and messages of a chat go
            through the tokenizer. Several add up, as `("prompt", "completion")`. By default
            `input_ids`, `length` or `lengths`, and with a tokenizer `text` or `messages`.
        tokenizer: a tokenizer, or the name or path of one of transformers, for data that is text or
            messages.
        groups: `True`, or the name of a column, also says what is gained where documents that begin
            alike share rows and their beginning is computed once, as `autopack.pack(groups=...)`
            does; for data that holds tokens.
        max_tokens: also says what `enable(trainer, max_tokens=...)` gains in the optimizer steps of
            so many `ranks`, with `accumulation` batches of each.
        on: also predicts, by roofline, what a GPU would make of it: `"h100"`, `"a100"`,
            `"rtx4090"` or `"mi300x"`.

    Raises `InvalidPacking` for data that holds no lengths, or lengths that are not ints of at least
    1, and `ValueError` for options out of range.
    """
    check_options(estimate, locals())
    check_in("on", on, (None, *DEVICES))
    cost = cost or CostModel()
    documents = documents_of(data) if groups else None
    given = lengths_of(data, column, tokenizer) if documents is None else read(documents.lengths)
    pieces, counts = fit(given, max_length, overflow)
    if not len(lengths := pieces.lengths):
        raise nothing_left(counts)
    real, shuffled = int(lengths.sum()), np.random.default_rng(0).permutation(lengths)
    base = _tokens_and_pairs(shuffled, batch_size)

    def arm(
        name: str,
        rows: int,
        tokens: int,
        pairs: int,
        used: int = real,
        size: int | None = None,
        order: Any = None,
    ) -> EstimatedArm:
        own, whole = (cost.linear * t + cost.quadratic * p for t, p in ((tokens, pairs), base))
        of_base = whole / own, 1 - tokens / base[0], 1 - pairs / base[1]
        return EstimatedArm(
            name, size, order, rows, tokens, 1 - used / tokens, pairs, own, *of_base
        )

    padded = [
        arm("padded", len(lengths), *_tokens_and_pairs(ordered, size), size=size, order=order)
        for size in sorted({*batch_sizes, batch_size})
        for order, ordered in (
            ("random", shuffled),
            ("grouped", _grouped_by_length(shuffled, size)),
        )
    ]
    rows = -(-len(lengths) // batch_size)
    packed = [arm("mini-batch", rows, real, int((lengths * lengths).sum()), size=batch_size)]
    plans = [plan(lengths, max_length, name) for name in strategies]
    if documents is not None:
        found = {name: of[pieces.documents] for name, of in groups_of(documents, groups).items()}
        found["prefixes"] = np.minimum(found["prefixes"], max_length)
        plans.append(plan(lengths, max_length, **found))
    for made in plans:
        name = made.strategy if made.shared is None else f"{made.strategy}, groups"
        columns, pairs = made.columns_per_row, int(made.costs(CostModel(0, 1)).sum())
        packed.append(
            arm(name, len(made), len(made) * int(columns.max()), pairs, int(columns.sum()))
        )
    baseline = arm("padded", len(lengths), *base, size=batch_size, order="random")
    steps = (
        cost_of_steps(shuffled, batch_size, ranks, accumulation, max_tokens, cost)
        if max_tokens
        else ()
    )
    arms = tuple(padded), tuple(packed)
    whole = Estimate(lengths, counts, max_length, cost, baseline, *arms, steps, on)
    return replace(whole, predicted=predict(whole._compared, on, cost, real)) if on else whole
