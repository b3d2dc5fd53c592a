"""Strategies against the same written plainly, one document at a time; and orders, against sorting what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopack.packing import strategies
from autopack.packing.strategies import STRATEGIES, descending, permutation

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


def rows_of(strategy: str, lengths: np.ndarray, max_length: int, limit: int, seed: int) -> Rows:
    order, bounds = STRATEGIES[strategy](lengths, max_length, limit, seed)
    return [part.tolist() for part in np.split(order, bounds[1:-1])]


@given(asked())
def test_random_and_sorted_are_next_fit_of_their_orders(given):
    lengths, max_length, limit, seed = given
    for name, order in (("random", drawn(len(lengths), seed)), ("sorted", longest_first(lengths, seed))):
        wanted: Rows = [[]]
        for index in order:
            if len(wanted[-1]) == limit or int(lengths[wanted[-1]].sum() + lengths[index]) > max_length:
                wanted.append([])
            wanted[-1].append(index)
        assert rows_of(name, lengths, max_length, limit, seed) == wanted


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
