"""Ways of filling rows: by best fit, and in order. Each takes lengths that fit, and gives the rows.

They work on numbers of documents per length, or on sums over all documents, and not on one document
at a time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from autopack.packing.lengths import bounds_of, numbered

Rows = tuple[np.ndarray, np.ndarray]
"""Indices in the order of rows, and the bounds of the rows in it."""


def permutation(count: int, seed: int, lengths: np.ndarray | None = None) -> np.ndarray:
    """Return a random order of `count` things, or by length, longest first, random among equal
    lengths.

    Its source is 64 raw bits of PCG64 for each thing, which are the same in every release of numpy.
    `Generator.permutation` may change, and then a resumed run would go on with other rows.

    One array is sorted in place. It holds, for each index, how much shorter it is than the longest,
    as many of the drawn bits as there is room for, and the index itself, which decides where those
    bits are the same.
    """
    longest = 0 if lengths is None else int(lengths.max())
    of_length = 0 if lengths is None else (longest - int(lengths.min())).bit_length()
    index_bits = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    packed = np.random.PCG64(seed).random_raw(count)
    packed >>= np.uint64(of_length)
    packed &= ~index_bits
    packed |= np.arange(count, dtype=np.uint64)
    if lengths is not None and of_length:
        shorter = longest - lengths
        shorter <<= 64 - of_length
        packed |= shorter.view(np.uint64)
    packed.sort()
    packed &= index_bits
    return packed.view(np.int64)


def best_fit(lengths: np.ndarray, max_length: int, limit: int, seed: int) -> Rows:
    """Return rows by best-fit decreasing: longest document first, into the least room that
    suffices.

    Rows of equal room and documents of equal length are interchangeable, so ranges of rows take
    documents together: a row with the least room keeps the least room as long as the next document
    of that length fits. The work grows with the number of different lengths and rooms, and hardly
    with the number of documents.
    """
    least, opened = int(lengths.min()), 0
    rooms: list[int] = []  # of rows that are not full, ascending, each once
    # first row, end, documents of each
    ranges: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    placed = []  # first row, rows, and how many documents each of them took, in this order

    def push(room: int, start: int, stop: int, held: int) -> None:
        if not ranges[room]:
            insort(rooms, room)
        ranges[room].append((start, stop, held))

    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, size)  # the least room that suffices
            if at == len(rooms):
                room, start, held = max_length, opened, 0
                stop = opened = opened + -(-count // min(max_length // size, limit))
            else:
                room = rooms[at]
                start, stop, held = ranges[room].pop()
                if not ranges[room]:
                    del rooms[at]
            fit = min(room // size, limit - held, count)
            rows = min(stop - start, count // fit)
            placed.append((start, rows, fit))
            if room - fit * size >= least and held + fit < limit:
                push(room - fit * size, start, start + rows, held + fit)
            if start + rows < stop:
                push(room, start + rows, stop, held)
            count -= rows * fit
    first, sizes, taken = np.array(placed).T
    numbers = np.repeat(first, sizes) + numbered(sizes)
    of_documents = np.repeat(numbers, np.repeat(taken, sizes))
    bounds = bounds_of(np.bincount(of_documents))
    row_by_row = np.argsort(of_documents, kind="stable")
    del of_documents  # as large as the lengths
    return permutation(len(lengths), seed, lengths)[row_by_row], bounds


def next_fit(lengths: np.ndarray, max_length: int, limit: int | np.ndarray) -> np.ndarray:
    """Return bounds of rows that are filled in order, each until the next document does not fit.

    `limit` is the most documents of a row, or of the row that begins with each of them.
    """
    ends = np.cumsum(lengths)
    following = np.searchsorted(ends, ends - lengths + max_length, side="right")
    following = memoryview(np.minimum(following, np.arange(len(lengths)) + limit))
    bounds, at = [0], 0
    while at < len(lengths):
        at = following[at]
        bounds.append(at)
    return np.array(bounds)
