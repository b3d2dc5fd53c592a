"""Strategies against the same written plainly, one document at a time; and orders, against sorting what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopack.packing import strategies
from autopack.packing.strategies import STRATEGIES, RowTree, descending, permutation

Rows = list[list[int]]


@st.composite
def asked(draw: st.DrawFn) -> tuple[np.ndarray, int, int, int]:
    """Lengths that fit, the max_length, the most documents of a row, and a seed."""
    max_length = draw(st.sampled_from([1, 2, 30, 64, 20_000, 1 << 31]))
    least, most = draw(st.sampled_from([(1, max_length), (1, min(3, max_length)), (max_length // 3 + 1, max_length)]))
    kinds = draw(st.sampled_from([1, 2, 100]))
    of = draw(st.lists(st.integers(min(least, most), most), min_size=1, max_size=kinds))
    lengths = draw(st.lists(st.sampled_from(of), min_size=1, max_size=120))
    return np.array(lengths), max_length, draw(st.sampled_from([1, 2, 5, max_length])), draw(st.integers(0, 2**40))


def drawn(count: int, seed: int) -> list[int]:
    """The random order of so many things, by Python's sort."""
    bits = np.random.PCG64(seed).random_raw(count).tolist()
    return sorted(range(count), key=bits.__getitem__)


def longest_first(lengths: np.ndarray, seed: int) -> list[int]:
    return sorted(drawn(len(lengths), seed), key=lambda index: -int(lengths[index]))


def fitted(lengths: np.ndarray, order: list[int], max_length: int, limit: int) -> Rows:
    """First fit in this order: the documents of each row."""
    rows: Rows = []
    for index in order:
        for row in rows:
            if len(row) < limit and int(lengths[row].sum() + lengths[index]) <= max_length:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


def in_steps(lengths: np.ndarray, order: list[int], max_length: int, limit: int, ranks: int) -> Rows:
    """The longest stretches of this order that first-fit decreasing fits into so many rows.

    First fit is not sure to fit fewer documents where it fits more, so these are searched as the multipack sampler
    does: from the most that there are tokens for, by steps that double, and then by halves.
    """

    def fit(stretch: list[int]) -> Rows:
        return fitted(lengths, sorted(stretch, key=lambda index: -int(lengths[index])), max_length, limit)

    found: Rows = []
    at = 0
    while at < len(order):
        most = max(n for n in range(len(order) - at + 1) if lengths[order[at : at + n]].sum() <= ranks * max_length)
        least, most, back = 0, min(most, limit * ranks), 0
        while least < most:
            tried = max(most - back, (least + most + 1) // 2)
            if len(fit(order[at : at + tried])) <= ranks:
                least = tried
            else:
                most, back = tried - 1, 2 * back + 1
        found += fit(order[at : at + least])
        at += least
    return found


def rows_of(strategy: str, lengths: np.ndarray, max_length: int, limit: int, ranks: int, seed: int) -> Rows:
    order, bounds = STRATEGIES[strategy](lengths, max_length, limit, ranks, seed)
    return [part.tolist() for part in np.split(order, bounds[1:-1])]


@pytest.mark.parametrize("way", ["row by row", "all rows at once", "both", "as it chooses"])
@given(asked())
def test_first_fit_is_first_fit_decreasing_document_by_document(way, given):
    lengths, max_length, limit, seed = given
    costs = {"row by row": (0.0, 1.0, 1.0), "all rows at once": (1.0, 0.0, 0.0), "both": (1.0, 1.5, 0.0)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("ROW_BY_ROW", "AT_ONCE", "ALL_ROWS"), costs.get(way, ()), strict=False):
            patch.setattr(strategies, name, value)
        found = rows_of("first_fit", lengths, max_length, limit, 1, seed)
    assert found == fitted(lengths, longest_first(lengths, seed), max_length, limit)


@pytest.mark.parametrize("few", [0, 1000])
@given(asked(), st.sampled_from([2, 3, 8, 200]))
def test_multipack_is_the_search_of_longest_stretches(few, given, ranks):
    lengths, max_length, limit, seed = given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "FEW", few)
        found = rows_of("multipack", lengths, max_length, limit, ranks, seed)
    assert found == in_steps(lengths, drawn(len(lengths), seed), max_length, limit, ranks)


@given(asked())
def test_random_and_sorted_are_next_fit_of_their_orders(given):
    lengths, max_length, limit, seed = given
    for name, order in (("random", drawn(len(lengths), seed)), ("sorted", longest_first(lengths, seed))):
        wanted: Rows = [[]]
        for index in order:
            if len(wanted[-1]) == limit or int(lengths[wanted[-1]].sum() + lengths[index]) > max_length:
                wanted.append([])
            wanted[-1].append(index)
        assert rows_of(name, lengths, max_length, limit, 1, seed) == wanted


@given(st.integers(0, 300), st.integers(0, 2**63))
def test_orders_are_those_of_the_drawn_bits(count, seed):
    assert permutation(count, seed).tolist() == drawn(count, seed)


@pytest.mark.parametrize("part", [1, 7, 1 << 20])
def test_orders_are_those_of_all_drawn_bits_where_there_is_room_for_few(part, monkeypatch):
    lengths = np.ones(20_000, np.int64)
    lengths[::5000] = 1 << 31  # 32 bits of length, 15 of the index: of the drawn bits of 20,000, many agree in 17
    lengths = lengths[: 20_000 if part > 7 else 600]
    monkeypatch.setattr(strategies, "PART", part)
    for seed in range(3):
        bits = np.random.PCG64(seed).random_raw(len(lengths))
        assert part <= 7 or len(np.unique(bits >> np.uint64(47))) < len(lengths) - 1000
        order = np.argsort(bits, kind="stable")
        wanted = order[np.argsort(-lengths[order], kind="stable")]
        assert np.array_equal(descending(lengths, seed), wanted)
        assert np.array_equal(permutation(len(lengths), seed), order)


def test_first_fit_looks_at_few_rows_for_every_document(monkeypatch):
    asked = 0

    class Counted(list[int]):
        def __getitem__(self, at):
            nonlocal asked
            asked += 1
            return super().__getitem__(at)

    lengths = np.random.default_rng(0).permutation(np.arange(1, 4001)) + (1 << 19)
    tree = RowTree(1 << 20, 1 << 20, 4000)
    tree._largest = Counted(tree._largest)
    tree.place(sorted(lengths.tolist(), reverse=True), [1] * 4000)
    assert asked <= 4000 * 5 * 12
