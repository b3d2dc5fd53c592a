"""Ways to choose which documents share a row. Each takes lengths that fit, and gives the rows.

They work on numbers of documents per length, or on sums over all documents, and not on one document at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from autopack.packing.lengths import bounds_of, numbered

Rows = tuple[np.ndarray, np.ndarray]
"""Indices in the order of rows, and the bounds of the rows in it."""
OrderOf = Callable[[np.ndarray, int], np.ndarray]

ORDERED = ("sequential", "sorted", "fixed_length")
"""Strategies whose rows have an order that means something."""


def permutation(count: int, seed: int) -> np.ndarray:
    """A random order of `count` things.

    It comes from the raw bits of PCG64, which are the same in every release of numpy; `Generator.permutation` may
    change, and then a run that is resumed would go on with other rows.
    """
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def shuffled(lengths: np.ndarray, seed: int) -> np.ndarray:
    return permutation(len(lengths), seed)


def descending(lengths: np.ndarray, seed: int) -> np.ndarray:
    """Indices from long to short; documents of one length in random order."""
    order = permutation(len(lengths), seed)
    keys = lengths.max() - lengths[order]
    narrow = np.uint16 if keys.max() < 1 << 16 else np.int64  # numpy sorts 16 bits in linear time
    return order[np.argsort(keys.astype(narrow), kind="stable")]


def per_length(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Every length that occurs, from long to short, and how often."""
    values, counts = np.unique(lengths, return_counts=True)
    return list(zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True))


def gather(order: np.ndarray, rows: np.ndarray) -> Rows:
    """Documents in `order` went to these rows, one number per document."""
    return order[np.argsort(rows, kind="stable")], bounds_of(np.bincount(rows))


class Rooms:
    """Rows by the room that is left in them, as ranges of row numbers; finds the smallest room of at least a size."""

    def __init__(self) -> None:
        self._in_use: list[int] = []  # ascending
        self._ranges: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def push(self, room: int, start: int, stop: int, held: int) -> None:
        """Rows `start` to `stop` have this room, and hold so many documents each."""
        if not self._ranges[room]:
            insort(self._in_use, room)
        self._ranges[room].append((start, stop, held))

    def pop(self, size: int) -> tuple[int, int, int, int] | None:
        """Takes out one range of the smallest room of at least `size`: room, start, stop and documents."""
        at = bisect_left(self._in_use, size)
        if at == len(self._in_use):
            return None
        room = self._in_use[at]
        taken = self._ranges[room].pop()
        if not self._ranges[room]:
            del self._in_use[at]
        return room, *taken


def best_fit(lengths: np.ndarray, capacity: int, limit: int, ranks: int, seed: int) -> Rows:
    """Best-fit decreasing: the longest document first, into the row with the least room that suffices.

    Rows of equal room and documents of equal length cannot be told apart, so that ranges of rows take documents
    together: a row with the least room stays the one with the least room for as long as the next document of that
    length fits. The work grows with the number of different lengths and rooms, and hardly with that of documents.
    """
    least, opened = int(lengths.min()), 0
    rooms = Rooms()
    placed = []  # first row, rows, and how many documents each of them took, in this order

    def put(room: int, start: int, rows: int, held: int, count: int, size: int) -> None:
        placed.append((start, rows, count))
        room, held = room - count * size, held + count
        if room >= least and held < limit:
            rooms.push(room, start, start + rows, held)

    for size, count in per_length(lengths):
        while count:
            found = rooms.pop(size)
            if found is None:
                fit = min(capacity // size, limit)
                found = capacity, opened, opened + -(-count // fit), 0
                opened = found[2]
            room, start, stop, held = found
            fit = min(room // size, limit - held)
            full = min(stop - start, count // fit)
            if full:
                put(room, start, full, held, fit, size)
                count -= full * fit
                start += full
            if start < stop and 0 < count < fit:
                put(room, start, 1, held, count, size)
                start, count = start + 1, 0
            if start < stop:
                rooms.push(room, start, stop, held)
    first, rows, taken = np.array(placed).T
    numbers = np.repeat(first, rows) + numbered(rows)
    return gather(descending(lengths, seed), np.repeat(numbers, np.repeat(taken, rows)))


def first_fit(lengths: np.ndarray, capacity: int, limit: int, ranks: int, seed: int) -> Rows:
    """First-fit decreasing: the longest document first, into the first row that has room.

    Documents of equal length are placed together: the rows with room, in their order, take as many as fit.
    """
    rooms, held = np.full(len(lengths), capacity), np.zeros(len(lengths), np.int64)
    opened, placed = 0, []
    for size, count in per_length(lengths):
        enough = opened + -(-count // min(capacity // size, limit))
        rows = np.flatnonzero(rooms[:enough] >= size)
        fit = np.minimum(rooms[rows] // size, limit - held[rows])
        upto = np.cumsum(fit)
        needed = int(np.searchsorted(upto, count)) + 1
        rows, fit = rows[:needed], fit[:needed]
        fit[-1] -= upto[needed - 1] - count
        rooms[rows] -= fit * size
        held[rows] += fit
        rooms[rows[held[rows] >= limit]] = 0
        opened = max(opened, int(rows[-1]) + 1)
        placed.append(np.repeat(rows, fit))
    return gather(descending(lengths, seed), np.concatenate(placed))


def next_fit(lengths: np.ndarray, capacity: int, limit: int | np.ndarray) -> np.ndarray:
    """Bounds of rows that are filled in order, each until the next document does not fit.

    `limit` is the most documents of a row, or of the row that begins with each of them.
    """
    ends = np.cumsum(lengths)
    following = np.searchsorted(ends, ends - lengths + capacity, side="right")
    following = memoryview(np.minimum(following, np.arange(len(lengths)) + limit))
    bounds, at = [0], 0
    while at < len(lengths):
        at = following[at]
        bounds.append(at)
    return np.array(bounds)


def in_order(of: OrderOf, lengths: np.ndarray, capacity: int, limit: int, ranks: int, seed: int) -> Rows:
    """Next-fit in the order that a function makes of lengths and seed."""
    order = of(lengths, seed)
    return order, next_fit(lengths[order], capacity, limit)


def _first_fit_few(sizes: np.ndarray, capacity: int, limit: int, ranks: int) -> list[list[int]] | None:
    """First-fit decreasing of some documents into at most `ranks` rows; `None` where they do not fit."""
    rooms, rows = [capacity] * ranks, [list[int]() for _ in range(ranks)]
    order = np.argsort(-sizes, kind="stable")
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        for row, room in enumerate(rooms):
            if size <= room and len(rows[row]) < limit:
                rooms[row] = room - size
                rows[row].append(index)
                break
        else:
            return None
    return [row for row in rows if row]


def multipack(lengths: np.ndarray, capacity: int, limit: int, ranks: int, seed: int) -> Rows:
    """A random order, cut into the longest stretches that first-fit decreasing fits into one row per rank.

    The method of the multipack sampler (github.com/imoneoi/multipack_sampler): every stretch is one step of all ranks.
    """
    if ranks == 1:
        return in_order(shuffled, lengths, capacity, limit, ranks, seed)
    order = shuffled(lengths, seed)
    sizes = lengths[order]
    ends = np.cumsum(sizes)
    at, chosen = 0, []
    while at < len(sizes):
        most = int(np.searchsorted(ends, ends[at] - sizes[at] + ranks * capacity, side="right")) - at
        most = min(most, limit * ranks)
        least, rows, back = 0, list[list[int]](), 0  # `least` documents fit, in `rows`; `most + 1` are too many
        while least < most:
            tried = max(most - back, (least + most + 1) // 2)
            found = _first_fit_few(sizes[at : at + tried], capacity, limit, ranks)
            if found is None:
                most, back = tried - 1, 2 * back + 1
            else:
                least, rows = tried, found
        chosen += [order[at + np.array(row)] for row in rows]
        at += least
    return np.concatenate(chosen), bounds_of([len(row) for row in chosen])


STRATEGIES: dict[str, Callable[[np.ndarray, int, int, int, int], Rows]] = {
    "best_fit": best_fit,
    "first_fit": first_fit,
    "multipack": multipack,
    "sequential": partial(in_order, lambda lengths, seed: np.arange(len(lengths))),
    "sorted": partial(in_order, descending),
    "random": partial(in_order, shuffled),
}
"""By name; each takes lengths, capacity, most documents per row, ranks and seed. `fixed_length` cuts instead."""
