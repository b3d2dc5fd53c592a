"""Plans: rows of documents for a whole data set at once.

`plan` takes the lengths of all documents and gives a `Plan`. Documents that begin alike make a
group, which shares a row. An enabled model finds common beginnings of a row's documents by itself
(`autopack.calls.prefixes`). Here such documents are only put together, and a row holds as many as
fit if the beginning counts once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, Literal

import numpy as np

from autopack.layout import LEAST_SHARED
from autopack.packing.checks import (
    IDS,
    Counts,
    Overflow,
    Pieces,
    check_each,
    check_ints,
    check_options,
    fit,
    ints,
    other_data,
    read,
    sums,
    wrong_numbers,
    zeros,
)
from autopack.packing.strategies import CostModel, arrange, best_fit, complete, next_fit

Strategy = Literal["best_fit", "sequential"]
_FORMAT = 1
ALONE = -1
"""Group number of documents without a group."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Pieces):
    """Rows of documents, as arrays of their indices and lengths.

    A *piece* is a document, or a part of one if documents were cut. `len(plan)` is the number of
    rows; `plan[r]` gives the documents of row r, (pieces,) int64, and a slice gives a plan of those
    rows; iteration goes over rows.

    Attributes:
        documents: (pieces,) int64, the index of the document of each piece, row by row.
        offsets: (pieces,) int64, the token of its document at which each piece begins: 0 unless
            documents were cut.
        lengths: (pieces,) int64, tokens of each piece.
        bounds: (rows + 1,) int64; row r holds the pieces `bounds[r]` to `bounds[r + 1]`.
        max_length: the most tokens that a row may hold.
        strategy, seed: how documents were chosen, and the seed of all that was random.
        counts: documents and tokens given, and the effect of `overflow` on documents longer than a
            row.
        shared: (pieces,) int64, the tokens of each piece that are computed with another piece of
            its row, since they begin alike; None if no groups were given.
    """

    bounds: np.ndarray
    max_length: int
    strategy: str
    seed: int
    counts: Counts

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.select(np.arange(*row.indices(len(self))))
        return self.documents[self.pieces(row)]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(np.array_equal(v, vars(other)[name]) for name, v in vars(self).items())

    def __repr__(self) -> str:
        did = "".join(f", {name} {value:,}" for name, value in self.counts.overflow.items())
        pieces, documents = len(self.documents), self.counts.documents
        what = (
            f"{documents:,} documents"
            if pieces == documents
            else f"{pieces:,} pieces of {documents:,} documents"
        )
        rows = f"{len(self):,} rows of {self.max_length:,} tokens"
        if self.shared is not None:
            rows += f" to compute, beside {int(self.shared.sum()):,} that others begin with as well"
        return (
            f"Plan({self.strategy}: {what} in {rows}, fill {self.fill:.4f}, padding "
            f"{self.padding:,}{did})"
        )

    def pieces(self, row: int) -> slice:
        """Return the pieces of a row, as a slice of `documents`, `offsets` and `lengths`."""
        row = range(len(self))[row]
        return slice(int(self.bounds[row]), int(self.bounds[row + 1]))

    def select(self, rows: Any) -> Plan:
        """Return the plan of these rows alone, in this order: (rows,) ints, each at most once.

        `counts` stays as it is.
        """
        found, bounds = self._rows(self.bounds, np.asarray(rows, np.int64))
        return replace(found, bounds=bounds)

    @property
    def tokens_per_row(self) -> np.ndarray:
        """Number of tokens of each row, (rows,), beyond `max_length` only if some are shared."""
        return sums(self.lengths, self.bounds)

    @property
    def columns_per_row(self) -> np.ndarray:
        """Number of columns that the documents of each row take, (rows,): shared tokens once."""
        return sums(self._computed, self.bounds)

    @property
    def fill(self) -> float:
        """Share of all columns that hold tokens, if every row is padded to `max_length`.

        Shared tokens count once.
        """
        columns = len(self) * self.max_length
        return 1 - self.padding / columns if columns else 1.0

    @property
    def padding(self) -> int:
        """Columns without a token, if every row is padded to `max_length`."""
        return len(self) * self.max_length - int(self._computed.sum())

    def costs(self, cost: CostModel) -> np.ndarray:
        """Return the cost of each row, (rows,) float64, in the units of the cost model."""
        return cost.of_rows(self.lengths, self.bounds, self.shared)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file of numpy's `.npz` format, under exactly this name."""
        arrays = {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray)}
        meta = {"strategy": self.strategy, "seed": self.seed, "capacity": self.max_length}
        meta |= {"format": _FORMAT, "counts": asdict(self.counts)}
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Return the plan in a file of `save`, unpickling nothing; raise `InvalidPacking` else."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
            meta = json.loads(str(arrays.pop("meta")))
            if meta.pop("format") != _FORMAT or meta.pop("align", 1) != 1:
                raise ValueError("a plan that this release has no more; make it again")
            arrays.setdefault("offsets", np.zeros_like(arrays["documents"]))
            meta["max_length"], meta["counts"] = meta.pop("capacity"), Counts(**meta["counts"])
            check_ints(max_length=meta["max_length"])
            given: dict[str, Any] = {"shared": None, **arrays, **meta}
            found, bounds = cls(**given), arrays["bounds"]
            contradicts = [
                *(array.ndim != 1 or array.dtype.kind != "i" for array in arrays.values()),
                *((array < (name == "lengths")).any() for name, array in arrays.items()),
                *(len(array) != bounds[-1] for name, array in arrays.items() if name != "bounds"),
                bounds[0] != 0 or (np.diff(bounds) < 1).any(),
                (found.columns_per_row > found.max_length).any(),
            ]
            if any(contradicts):
                raise ValueError("arrays that contradict each other; make the plan again")
            return found
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of numpy, zipfile, zlib and json
            raise other_data(
                f"{path}: wanted a plan that Plan.save wrote, found {error!r}"
            ) from error


def plan(
    lengths: Any,
    max_length: int,
    strategy: Strategy = "best_fit",
    *,
    seed: int = 0,
    overflow: Overflow = "error",
    max_documents: int | None = None,
    cost: CostModel | None = None,
    ranks: int = 1,
    groups: Any = None,
    prefixes: Any = None,
) -> Plan:
    """Return a plan that puts documents into rows of at most `max_length` tokens.

    Args:
        lengths: tokens of each document: ints of at least 1, as a list, array, tensor or column.
        max_length: the most tokens of a row.
        strategy: `"best_fit"`: best-fit decreasing, the fullest rows. `"sequential"`: in order,
            with a new row if the next document does not fit.
        seed: of random orders, and of the places of documents of one length. The same seed gives
            the same plan on every machine.
        overflow: treatment of a document longer than a row. `"error"` refuses it, `"truncate"`
            keeps its beginning, `"split"` makes several pieces of it, `"drop"` leaves it out;
            `Plan.counts` says how much.
        max_documents: the most documents, or pieces, of a row.
        cost: the cost of a row. Rows of similar cost then make a step, and steps are in random
            order. `"sequential"`, which has an order of its own, refuses it.
        ranks: processes that take a row each in every step: rows `s * ranks` to `(s + 1) * ranks`
            are step s. Some rows are split between documents so that the last step is complete. If
            there are too few documents for that, `len(plan)` is no multiple of `ranks`.
        groups: an int for each document: documents of one number begin alike (completions of
            one prompt) and share a row, or as few as hold them; -1 is for documents by themselves.
            `max_length`, fill and costs count computed tokens (`enable(model, share=...)`): a
            group's common beginning counts once in each row, so that rows may have more tokens than
            that.
        prefixes: an int for each document: how many tokens its group begins with in common; the
            least of a group counts.

    Every document (or every one of its tokens, if documents are cut) is in the plan once. Raises
    `InvalidPacking` for lengths that cannot be packed, with the first of them, and `ValueError` for
    options that are out of range, unknown, or contradict each other.
    """
    check_options(plan, locals())
    if cost is not None and not isinstance(cost, CostModel):
        raise ValueError(f"cost={cost!r}: wanted an autopack.packing.CostModel, or None")
    if cost is not None and strategy == "sequential":
        raise ValueError(
            f"cost= orders rows by what they cost, and strategy={strategy!r} has an order: leave "
            "one out"
        )
    max_length, ranks, seed = int(max_length), int(ranks), int(seed)
    found = read(lengths, copy=False)
    grouped = read_groups(groups, prefixes, found)
    if grouped and (overflow == "split" or max_documents is not None):
        raise ValueError(
            "groups= go into a row together, whole: leave max_documents= and overflow='split' out"
        )
    limit = min(max_length, int(max_documents or max_length))
    units: np.ndarray | None = None
    bounds = np.zeros(1, np.int64)
    pieces, counts = fit(found, max_length, overflow)
    if grouped and len(pieces.lengths):
        pieces, units = units_of(pieces, max_length=max_length, **grouped)
    rooms = pieces._computed if units is None else sums(pieces._computed, units)
    if len(rooms):
        if strategy == "best_fit":
            order, bounds = best_fit(rooms, max_length, limit, seed)
        else:
            order, bounds = np.arange(len(rooms)), next_fit(rooms, max_length, limit)
        bounds = complete(bounds, ranks)
        if units is None:
            pieces = pieces._take(order)
        else:
            pieces, ends = pieces._rows(units, order)
            bounds = ends[bounds]
    made = Plan(
        **vars(pieces),
        bounds=bounds,
        max_length=max_length,
        strategy=strategy,
        seed=seed,
        counts=counts,
    )
    return made if cost is None else made.select(arrange(made.costs(cost), ranks, seed))


def units_of(
    pieces: Pieces, groups: np.ndarray, prefixes: np.ndarray, max_length: int
) -> tuple[Pieces, np.ndarray]:
    """Return the pieces in order of units, which share a row, and units' bounds, (units + 1,).

    A unit goes into a row as a whole: a group, or a part of one that is too long for a row. Tokens
    that it begins with are `shared` in all its pieces but the first. `groups` and `prefixes` are of
    all documents.
    """
    groups = groups[pieces.documents]
    # a group for each
    groups = np.where(groups == ALONE, ALONE - 1 - np.arange(len(groups)), groups)
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(groups[order]) != 0))
    sizes = np.diff(starts, append=len(order))
    lengths = pieces.lengths[order]
    prefixes = np.minimum.reduceat(np.minimum(prefixes[pieces.documents][order], lengths), starts)
    rooms = np.add.reduceat(lengths, starts) - (sizes - 1) * prefixes
    begins = starts
    for number in np.flatnonzero(rooms > max_length).tolist():
        rests = lengths[starts[number] : starts[number] + sizes[number]] - prefixes[number]
        # Documents that are nothing but the prefix take no room, and one of them may fill a row
        # with it.
        parts = next_fit(
            np.maximum(rests, 1), max(1, max_length - int(prefixes[number])), len(rests)
        )
        begins = np.union1d(begins, starts[number] + parts[:-1])
    # In the order in which they come, which some strategies keep.
    turn = np.argsort(np.minimum.reduceat(order, begins), kind="stable")
    members, bounds = pieces._take(order)._rows(np.append(begins, len(order)), turn)
    shared = np.repeat(np.repeat(prefixes, sizes)[begins[turn]], np.diff(bounds))
    shared[bounds[:-1]] = 0
    return replace(members, shared=shared), bounds


def groups_of(documents: Any, by: str | bool) -> dict[str, np.ndarray]:
    """Return arguments `groups` and `prefixes` for `autopack.packing.plan`; {} if `by` is False.

    `documents` are `autopack.packing.documents.Documents`. `by` names a column, in which equal
    values make a group, or is True for groups of the same `LEAST_SHARED` first tokens. Prefixes are
    how many tokens each document's group begins with in common: 0 without a group, and for fewer
    than `LEAST_SHARED`.
    """
    if by is False:
        return {}
    lengths = documents.lengths
    groups = np.full(len(lengths), ALONE) if by is True else documents.value_numbers(by)
    long = np.flatnonzero(lengths >= LEAST_SHARED)
    if by is True and len(long):
        ids = _first_tokens(documents, long, LEAST_SHARED)
        groups[long] = np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)
    prefixes = np.zeros(len(lengths), np.int64)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) < 2 or groups[members[0]] == ALONE:
            continue
        ids = _first_tokens(documents, members, int(lengths[members].min()))
        same = np.append((ids == ids[0]).all(axis=0), False).argmin()
        prefixes[members] = same if same >= LEAST_SHARED else 0
    return {"groups": groups, "prefixes": prefixes}


def _first_tokens(documents: Any, chosen: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` tokens of the chosen documents, (documents, count)."""
    ids = documents.values(chosen, zeros(len(chosen)), np.full(len(chosen), count), (IDS,))[IDS]
    return ids.reshape(-1, count)


def read_groups(groups: Any, prefixes: Any, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Return `groups` and `prefixes` as (documents,) int64, by name; {} if neither was given.

    Raises `InvalidPacking` unless there is an int for each document, and a beginning of it, and
    `ValueError` for prefixes without groups.
    """
    if groups is None and prefixes is None:
        return {}
    if groups is None:
        raise ValueError("prefixes= says what documents of one group begin with: pass groups=, too")
    found = {}
    for name, given, least, most, wanted in (
        ("groups", groups, ALONE, np.iinfo(np.int64).max, "at least -1, of 64 bits"),
        ("prefixes", prefixes, 0, lengths, "at least 0, and at most the tokens of its document"),
    ):
        numbers = zeros(len(lengths)) if given is None else ints(name, given)
        if len(numbers) != len(lengths):
            raise wrong_numbers(
                f"{name}: wanted {len(lengths)} ints, one per document; found {len(numbers)}"
            )
        check_each(name, numbers, (numbers < least) | (numbers > most), f"wanted {wanted}")
        found[name] = numbers.astype(np.int64)
    return found
