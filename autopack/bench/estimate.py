"""The gain of packing on a data set, from lengths: padding, tokens and attention of padded batches and of packed rows.

Nothing is trained and nothing is timed: costs are those of a `CostModel`, and what is counted are lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from autopack.bench.sources import documents_of, lengths_of
from autopack.errors import InvalidPacking
from autopack.packing.balance import CostModel
from autopack.packing.checks import check_int
from autopack.packing.groups import groups_of
from autopack.packing.lengths import LONGEST, Counts, Overflow, fit, read
from autopack.packing.plans import Plan, Strategy, plan
from autopack.pages import figure as drawing
from autopack.pages import parts
from autopack.pages.figure import GROUPED, PACKED, PADDED, Bar, Bars, Chart, Histogram

Order = Literal["random", "grouped"]
MEGABATCHES = 50
"""Batches among which transformers groups documents by length."""


@dataclass(frozen=True)
class EstimatedArm:
    """One way of making batches of the documents, for one epoch.

    Attributes:
        name: `"padded"`, `"mini-batch"` or a strategy of `autopack.packing.plan`, followed by `", groups"` where
            documents that begin alike share rows.
        batch_size: documents of a padded batch, or of a mini-batch that becomes one packed row; None for plans.
        order: of the documents of padded batches: `"random"`, or `"grouped"` by length as transformers'
            `group_by_length` does; None for others.
        rows: padded rows, or packed rows.
        tokens: columns that are computed, padding among them; rows of a plan are padded to the longest of them.
        padding: the share of those that is padding.
        pairs: pairs of columns that attention computes, the sum of squared lengths; causal attention needs half.
        cost: by the cost model, in tokens.
        speedup: the cost of the baseline over this one.
        tokens_saved, attention_saved: the share of the baseline's tokens, and of its pairs, that it does not compute.
    """

    name: str
    batch_size: int | None
    order: Order | None
    rows: int
    tokens: int
    padding: float
    pairs: int
    cost: float
    speedup: float = 1.0
    tokens_saved: float = 0.0
    attention_saved: float = 0.0


@dataclass(frozen=True, repr=False)
class Estimate:
    """The estimated gain; `str()` is a table, and `found[name]` the packed arm of that name.

    Attributes:
        lengths: (documents,) int64, tokens of each, after what `overflow` did.
        counts: what was given, and what was done to documents longer than a row.
        max_length: the most tokens of a row.
        cost: the cost model.
        baseline: padded batches in random order, which the others are compared with.
        padded: padded batches of all sizes, in both orders.
        packed: the mini-batches of `PackingCollator`, and the plans of all strategies.
    """

    lengths: np.ndarray
    counts: Counts
    max_length: int
    cost: CostModel
    baseline: EstimatedArm
    padded: tuple[EstimatedArm, ...]
    packed: tuple[EstimatedArm, ...]

    def __getitem__(self, name: str) -> EstimatedArm:
        found = {arm.name: arm for arm in self.packed}
        if name not in found:
            raise KeyError(f"{name!r}: wanted one of {', '.join(found)}")
        return found[name]

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain data; of the lengths, their spread."""
        shares = {"min": 0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "max": 1}
        quantiles = np.quantile(self.lengths, list(shares.values())).tolist()
        spread = {**dict(zip(shares, quantiles, strict=True)), "mean": float(self.lengths.mean())}
        return asdict(self) | {"lengths": spread}

    def __repr__(self) -> str:
        best = max(self.packed, key=lambda arm: arm.speedup)
        batches = f"padding {self.baseline.padding:.0%} in batches of {self.baseline.batch_size}"
        return f"Estimate({len(self.lengths):,} documents, {batches}, {best.speedup:.2f} x by {best.name})"

    def __str__(self) -> str:
        lines = self._head()
        for caption, sides, rows in self._tables():
            lines += [f"\n{caption}", *parts.text_table(rows, sides)]
        return "\n".join([*lines, "", *self._notes()])

    def _repr_html_(self) -> str:
        notes = self._notes()
        return parts.joined(
            parts.lines(self._head()),
            drawing.figures(self._charts()),
            *(parts.table(head, rows, sides, caption) for caption, sides, (head, *rows) in self._tables()),
            parts.lines([" ".join(notes[:3]), *notes[3:]]),
        )

    def _head(self) -> list[str]:
        """Return the data in words: a line, and one more if documents are longer than a row."""
        counts = self.counts
        spread = ", ".join(f"{name} {value:,.0f}" for name, value in self.as_dict()["lengths"].items())
        over = {name: value for name, value in asdict(counts).items() if value and name not in ("documents", "tokens")}
        said = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in over.items())
        longer = [f"longer than {self.max_length:,} tokens: {said}"] if over else []
        return [f"{counts.documents:,} documents, {counts.tokens:,} tokens: {spread}", *longer]

    def _tables(self) -> Iterator[tuple[str, str, list[list[str]]]]:
        """Of padded batches, and of packed rows with grouped batches above them: caption, sides, and cells."""
        pairs = zip(self.padded[::2], self.padded[1::2], strict=True)
        rows = [[str(r.batch_size), f"{r.padding:.1%}", f"{grouped.padding:.1%}"] for r, grouped in pairs]
        head = ["documents per batch", "random", "grouped by length"]
        yield "padded batches: share of padding", "<>>", [head, *rows]
        grouped = next(arm for arm in self._compared if arm.order == "grouped")
        named = [(f"{a.name} of {a.batch_size}" if a.batch_size else a.name, a) for a in self.packed]
        rows = [
            [name, f"{arm.rows:,}", f"{arm.padding:.2%}", f"{arm.tokens_saved:.1%}",
             f"{arm.attention_saved:.1%}", f"{arm.speedup:.2f} x"]
            for name, arm in [("padded, grouped", grouped), *named]
        ]  # fmt: skip
        head = ["", "rows", "padding", "tokens saved", "attention saved", "speed-up"]
        caption = f"packed rows, against padded batches of {self.baseline.batch_size} in random order"
        yield caption, "<>>>>>", [head, *rows]

    def _notes(self) -> list[str]:
        """Return lines that say what was counted."""
        cost = self.cost
        column, pair = f"{cost.linear:g}", f"1 / {1 / cost.quadratic:,.0f}" if cost.quadratic else "nothing"
        groups = any("groups" in arm.name for arm in self.packed)
        once = ["In rows of groups, what documents of one group begin with is computed once."] if groups else []
        return [
            f"Rows of plans hold at most {self.max_length:,} tokens and count as padded to the longest; "
            "attention stays inside documents.",
            f"Speed-up: cost of the padded batches over cost of the rows, where a column costs {column} and",
            f"a pair of columns {pair}. Nothing was timed.",
            *once,
        ]

    def plot(self) -> Any:
        """Draw lengths and speed; return the figure of matplotlib.

        Raises `AutopackError` where matplotlib is missing (`pip install "autopack[plot]"`).
        """
        title = f"{len(self.lengths):,} documents, {int(self.lengths.sum()):,} tokens, in rows of {self.max_length:,}"
        return drawing.picture(self._charts(), title)

    def _charts(self) -> list[Chart]:
        counts, edges = np.histogram(self.lengths, 60, (0, self.lengths.max()))
        colors, mean = {"random": PADDED, "grouped": GROUPED}, float(self.lengths.mean())
        bars = [
            Bar(
                f"padded, {arm.order}" if arm.order else arm.name,
                arm.speedup,
                f"{arm.speedup:.2f} x",
                colors.get(arm.order or "", PACKED),
            )
            for arm in self._compared
        ]
        caption, axes = f"Tokens of documents (dashed: mean {mean:,.0f})", ("tokens", "documents")
        return [
            Histogram(caption, counts.tolist(), edges.tolist(), axes, mean),
            Bars(f"Expected speed, against padded batches of {self.baseline.batch_size}", bars),
        ]

    @property
    def _compared(self) -> list[EstimatedArm]:
        """The padded batches of the baseline's size in both orders, and all that is packed."""
        return [arm for arm in self.padded if arm.batch_size == self.baseline.batch_size] + list(self.packed)


def padded_arms(lengths: np.ndarray, batch_sizes: list[int], cost: CostModel, seed: int) -> list[EstimatedArm]:
    """Batches of consecutive documents, each padded to its longest, for all sizes and orders."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    arms = []
    for size in batch_sizes:
        orders: dict[Order, np.ndarray] = {"random": shuffled, "grouped": _grouped(shuffled, size)}
        for order, ordered in orders.items():
            starts = np.arange(0, len(lengths), size)
            documents = np.diff(starts, append=len(lengths))
            longest = np.maximum.reduceat(ordered, starts)
            tokens, pairs = int((longest * documents).sum()), int((longest * longest * documents).sum())
            price, padding = float((cost(longest) * documents).sum()), 1 - int(lengths.sum()) / tokens
            arms.append(EstimatedArm("padded", size, order, len(lengths), tokens, padding, pairs, price))
    return arms


def _grouped(shuffled: np.ndarray, batch_size: int) -> np.ndarray:
    """Lengths in the order of transformers' `group_by_length`: from long to short among so many batches."""
    size = batch_size * max(1, min(len(shuffled) // (batch_size * 4), MEGABATCHES))
    whole = len(shuffled) // size * size
    grouped = -np.sort(-shuffled[:whole].reshape(-1, size), axis=1).ravel()
    return np.concatenate([grouped, -np.sort(-shuffled[whole:])])


def packed_arm(made: Plan, cost: CostModel) -> EstimatedArm:
    """Rows of a plan, padded to the longest of them; what documents of a group begin with counts once."""
    tokens = len(made) * int(made.columns_per_row.max())
    padding = tokens - int(made.columns_per_row.sum())
    price = float(made.costs(cost).sum()) + cost.linear * padding
    name = made.strategy if made.shared is None else f"{made.strategy}, groups"
    pairs = int((made.lengths * made.lengths if made.squares is None else made.squares).sum())
    return EstimatedArm(name, None, None, len(made), tokens, padding / tokens, pairs, price)


def estimate(
    data: Any,
    max_length: int = 4096,
    *,
    batch_size: int = 8,
    batch_sizes: Sequence[int] = (2, 4, 8, 16, 32, 64),
    strategies: Sequence[Strategy] = get_args(Strategy),
    overflow: Overflow = "truncate",
    cost: CostModel | None = None,
    ranks: int = 1,
    column: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    groups: str | bool = False,
    seed: int = 0,
) -> Estimate:
    """Says what packing a data set would gain, before any training.

    The expected speed-up is a ratio of costs by `cost`, summed over one epoch: each column that is computed costs
    `linear`, and each pair of columns of one padded row, or of one packed document, `quadratic`. It is what a device
    gives that is busy all the time, with attention that skips what packing masks; kernels that are launched for small
    batches gain more, and input that is waited for gains nothing.

    Args:
        data: tokens of each document, as a list, array or tensor of ints; a `datasets.Dataset` or list of mappings; or
            the path of a `.json`, `.jsonl`, `.npy` or `.parquet` file of lengths or examples, or of a dataset that
            `save_to_disk` wrote.
        max_length: the most tokens of a packed row, and of a document.
        batch_size, batch_sizes: documents of a padded batch, for the baseline and for the padding by batch size.
        strategies, ranks: see `autopack.packing.plan`.
        overflow: what becomes of documents longer than `max_length`, in padded batches too; see there.
        cost: what tokens and attention cost; by default those of a hidden size of 4096.
        column: of the data: ints are lengths, lists of ints tokens; text and messages of a chat go through the
            tokenizer. Several add up, as `("prompt", "completion")`. By default `input_ids`, `length` or `lengths`,
            and with a tokenizer `text` or `messages`.
        tokenizer: a tokenizer, or the name or path of one of transformers, for data that is text or messages.
        groups: `True`, or the name of a column, also says what is gained where documents that begin alike share rows
            and their beginning is computed once, as `autopack.pack(groups=...)` does; for data that holds tokens.
        seed: of the random orders.

    Raises `InvalidPacking` for data that holds no lengths, or lengths that are not ints of at least 1, and `ValueError`
    for options out of range.
    """
    for size in (batch_size, *batch_sizes):
        check_int("batch_size", size, 1)
    check_int("max_length", max_length, 1, most=LONGEST)
    cost = cost or CostModel()
    plan([1], max_length, overflow=overflow, seed=seed, ranks=ranks)  # checks the options
    documents = documents_of(data) if groups else None
    given = lengths_of(data, column, tokenizer) if documents is None else read(documents.lengths)
    pieces, counts = fit(given, max_length, overflow)
    if not len(lengths := pieces.lengths):
        raise InvalidPacking(
            f"all documents are longer than max_length={max_length}, and overflow='drop' leaves none",
            code="does-not-fit",
        )
    padded = padded_arms(lengths, sorted({*batch_sizes, batch_size}), cost, seed)
    baseline = next(arm for arm in padded if (arm.batch_size, arm.order) == (batch_size, "random"))
    own = int(lengths.sum()), 0.0, int((lengths * lengths).sum()), float(cost(lengths).sum())
    packed = [EstimatedArm("mini-batch", batch_size, None, -(-len(lengths) // batch_size), *own)]
    packed += [packed_arm(plan(lengths, max_length, name, seed=seed, ranks=ranks), cost) for name in strategies]
    if documents is not None:
        found = {name: of[pieces.documents] for name, of in groups_of(documents, groups).items()}
        found["prefixes"] = np.minimum(found["prefixes"], max_length)
        packed.append(packed_arm(plan(lengths, max_length, seed=seed, ranks=ranks, **found), cost))
    padded, packed = ([_against(baseline, arm) for arm in arms] for arms in (padded, packed))
    return Estimate(lengths, counts, max_length, cost, baseline, tuple(padded), tuple(packed))


def _against(baseline: EstimatedArm, arm: EstimatedArm) -> EstimatedArm:
    """Return an arm with what it saves of the baseline."""
    tokens, attention = 1 - arm.tokens / baseline.tokens, 1 - arm.pairs / baseline.pairs
    return replace(arm, speedup=baseline.cost / arm.cost, tokens_saved=tokens, attention_saved=attention)
