"""Plans: every document once, no row over its max_length, best fit as the textbook has it, and bad input by name."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from autopack import InvalidPacking
from autopack.packing import CostModel, Plan, plan
from autopack.packing.balance import imbalance, share
from autopack.packing.strategies import ORDERED
from tests.support.refusals import refused

WHOLE = ("best_fit", "sequential", "sorted", "random")
ATTENTION = CostModel(0, 1)


def flan_like(count: int, seed: int = 0) -> np.ndarray:
    """Lognormal lengths with the mean of FLAN_20k, 471, clipped at 4096."""
    drawn = np.random.default_rng(seed).lognormal(np.log(471) - 0.5, 1.0, count)
    return np.clip(np.round(drawn), 1, 4096).astype(np.int64)


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths that fit, and a max_length; the larger ones need several words of the index of rooms."""
    max_length = draw(st.sampled_from([1, 7, 30, 64, 20_000]))
    least = draw(st.sampled_from([1, max(1, max_length // 9)]))
    return draw(st.lists(st.integers(least, max_length), min_size=1, max_size=80)), max_length


def decreasing(lengths: list[int], max_length: int, limit: int, best: bool) -> list[list[int]]:
    """Best-fit or first-fit decreasing, one document at a time: the lengths in each row."""
    rows: list[list[int]] = []
    for size in sorted(lengths, reverse=True):
        open_rows = [row for row in rows if sum(row) + size <= max_length and len(row) < limit]
        if open_rows:
            (max(open_rows, key=sum) if best else open_rows[0]).append(size)
        else:
            rows.append([size])
    return rows


# What every strategy keeps


@pytest.mark.parametrize("strategy", WHOLE)
@given(
    asked(),
    st.integers(0, 3),
    st.sampled_from([None, 1, 2, 5]),
    st.integers(1, 5),
    st.sampled_from([None, CostModel(), ATTENTION]),
)
def test_every_document_once_and_no_row_over_its_limits(strategy, given, seed, limit, ranks, cost):
    lengths, max_length = given
    options: dict[str, Any] = {"seed": seed, "max_documents": limit, "ranks": ranks}
    if strategy not in ORDERED:
        options["cost"] = cost
    found = plan(lengths, max_length, strategy, **options)
    assert sorted(found.documents.tolist()) == list(range(len(lengths)))
    assert found.lengths.tolist() == [lengths[i] for i in found.documents]
    assert not found.offsets.any()
    assert (np.diff(found.bounds) >= 1).all()
    assert (np.diff(found.bounds) <= (limit or len(lengths))).all()
    assert found.tokens_per_row.max() <= max_length
    assert found == plan(lengths, max_length, strategy, **options)
    # Steps are complete wherever there are documents enough to make them so.
    rows = len(plan(lengths, max_length, strategy, seed=seed, max_documents=limit))
    steps = -(-rows // ranks)
    assert len(found) == (steps * ranks if len(lengths) >= steps * ranks else rows)
    if strategy == "sequential":
        assert found.documents.tolist() == list(range(len(lengths)))
    if strategy == "sorted":
        assert (np.diff(found.lengths) <= 0).all()


@given(asked())
def test_best_fit_has_the_rows_of_best_fit_decreasing(given):
    lengths, max_length = given
    found = plan(lengths, max_length)
    wanted = decreasing(lengths, max_length, len(lengths), best=True)
    assert len(found) == len(wanted)
    assert sorted(found.tokens_per_row.tolist()) == sorted(map(sum, wanted))


@given(asked(), st.sampled_from([1, 3, None]))
def test_sequential_opens_a_row_only_where_the_next_document_does_not_fit(given, limit):
    lengths, max_length = given
    found = plan(lengths, max_length, "sequential", max_documents=limit)
    for row in range(len(found) - 1):
        full = limit is not None and len(found[row]) == limit
        assert full or found.tokens_per_row[row] + found.lengths[found.bounds[row + 1]] > max_length


def test_flan_like_lengths_leave_hardly_any_padding():
    lengths = flan_like(50_000)
    best = plan(lengths, 4096)
    assert best.fill >= 0.999
    assert len(best) == -(-lengths.sum() // 4096), "no plan has fewer rows"
    assert best.padding == len(best) * 4096 - lengths.sum()
    assert plan(lengths, 4096, "random").fill < 0.9


def test_the_same_seed_gives_the_same_plan_everywhere():
    lengths = [5, 3, 3, 8, 1, 2, 2, 9, 4, 4]
    found = {s: [row.tolist() for row in plan(lengths, 10, s, seed=7, ranks=2)] for s in ("best_fit", "random")}
    found["by cost"] = [row.tolist() for row in plan(lengths, 10, seed=7, ranks=2, cost=CostModel())]
    assert found == PINNED
    assert plan(lengths, 10, seed=7) != plan(lengths, 10, seed=8)


PINNED = {
    "best_fit": [[7], [3, 6], [0, 9, 4], [8, 2], [1], [5]],
    "by cost": [[3], [7], [2, 1], [8, 5], [0, 4], [9, 6]],
    "random": [[6, 3], [4, 9, 0], [2, 8], [7], [5], [1]],
}


# Documents that are longer than a row


def covered(found: Plan) -> set[tuple[int, int]]:
    """All tokens of a plan, as document and token; each at most once."""
    tokens = [
        (d, token)
        for d, o, n in zip(found.documents.tolist(), found.offsets.tolist(), found.lengths.tolist(), strict=True)
        for token in range(o, o + n)
    ]
    assert len(set(tokens)) == len(tokens)
    return set(tokens)


@pytest.mark.parametrize("strategy", WHOLE)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 30))
def test_overflow_does_what_it_says_and_counts_it(strategy, lengths, max_length):
    every = {(d, token) for d, n in enumerate(lengths) for token in range(n)}
    over = [d for d, n in enumerate(lengths) if n > max_length]
    excess = {(d, token) for d, token in every if token >= max_length}
    of_over = {(d, token) for d, token in every if d in over}

    truncated = plan(lengths, max_length, strategy, overflow="truncate")
    assert covered(truncated) == every - excess
    assert (truncated.counts.truncated, truncated.counts.truncated_tokens) == (len(over), len(excess))
    split = plan(lengths, max_length, strategy, overflow="split")
    assert covered(split) == every
    assert split.counts.split == len(over)
    dropped = plan(lengths, max_length, strategy, overflow="drop")
    assert covered(dropped) == every - of_over
    assert (dropped.counts.dropped, dropped.counts.dropped_tokens) == (len(over), len(of_over))
    for found in (truncated, split, dropped):
        assert (found.counts.documents, found.counts.tokens) == (len(lengths), len(every))
        assert len(found) == 0 or found.tokens_per_row.max() <= max_length
        assert len(found) * max_length == found.padding + found.lengths.sum()
    if over:
        with refused("does-not-fit", match=rf"lengths\[{over[0]}\] is {lengths[over[0]]}, over the {max_length}"):
            plan(lengths, max_length, strategy)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 30))
def test_fixed_length_cuts_the_stream_of_all_documents(lengths, max_length):
    found = plan(lengths, max_length, "fixed_length")
    stream = [(d, token) for d, n in enumerate(lengths) for token in range(n)]
    pieces = zip(found.documents.tolist(), found.offsets.tolist(), found.lengths.tolist(), strict=True)
    assert [(d, o + i) for d, o, n in pieces for i in range(n)] == stream
    assert (found.tokens_per_row[:-1] == max_length).all()
    assert found.counts.split == sum(np.bincount(found.documents) > 1)


def test_positions_restart_at_documents():
    found = plan([5, 4, 3], 6, "fixed_length")
    assert [found.position_ids(r).tolist() for r in range(2)] == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]


# Balance


@pytest.mark.parametrize("strategy", ["best_fit", "random"])
def test_eight_ranks_have_like_work_in_every_step(strategy):
    lengths = flan_like(100_000)
    balanced = plan(lengths, 4096, strategy, cost=ATTENTION, ranks=8)
    steps = balanced.costs(ATTENTION).reshape(-1, 8)
    assert steps.max(axis=1).sum() / steps.mean(axis=1).sum() <= 1.05
    if strategy == "best_fit":
        assert imbalance(balanced.costs(ATTENTION), 8).max() <= 1.05
    # Control: without a cost the slowest rank of a random step has more than twice the mean.
    drawn = plan(lengths, 4096, "random", ranks=8)
    assert imbalance(drawn.costs(ATTENTION), 8).mean() > 2


def test_balance_does_not_leave_steps_in_the_order_of_their_cost():
    costs = plan(flan_like(20_000), 4096, cost=ATTENTION, ranks=8).costs(ATTENTION).reshape(-1, 8)
    order = np.arange(len(costs))
    assert abs(np.corrcoef(order, costs.mean(axis=1))[0, 1]) < 0.2
    assert len(set(costs.argmax(axis=1).tolist())) == 8, "the costliest row of a step is not always that of one rank"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_rounds_are_shared_out_one_row_to_each_rank(steps, rounds, ranks, seed):
    columns = share(np.random.default_rng(seed).random((steps, rounds, ranks)))
    assert columns.shape == (steps, ranks, rounds)
    assert (np.sort(columns, axis=1) == np.arange(ranks)[None, :, None]).all()


def test_rounds_are_shared_out_to_whoever_has_least_to_do():
    costs = np.array([[[4.0, 1.0], [3.0, 2.0]]])
    assert share(costs).tolist() == [[[0, 1], [1, 0]]]


def test_cost_model():
    assert CostModel(2, 0.5)([1, 4]).tolist() == [2.5, 16.0]
    assert CostModel.for_model(LlamaConfig(hidden_size=1024)) == CostModel(1.0, 1 / (12 * 1024))
    for wrong in ((-1, 1), (0, 0), (float("nan"), 1), (True, 1)):
        with pytest.raises(ValueError, match="wanted a"):
            CostModel(*wrong)
    with pytest.raises(ValueError, match="hidden_size"):
        CostModel.for_model(object())


# The value


@pytest.fixture
def small() -> Plan:
    return plan([5, 3, 3, 12, 1], 8, "sequential", overflow="split")


def test_rows_slices_and_iteration(small):
    assert [row.tolist() for row in small] == [[0, 1], [2], [3], [3, 4]]
    assert small[-1].tolist() == [3, 4]
    assert small[0].dtype == np.int64
    assert len(small[1:3]) == 2
    assert [row.tolist() for row in small[1:]] == [[2], [3], [3, 4]]
    assert small[3:].offsets.tolist() == [8, 0]
    assert small.select([3, 0]).tokens_per_row.tolist() == [5, 8]
    assert small.tokens_per_row.tolist() == [8, 3, 8, 5]
    assert small.histogram(2)[0].tolist() == [1, 3]
    for row in (4, -5):
        with pytest.raises(IndexError, match="a plan of 4 rows"):
            small[row]


def test_repr_says_what_was_done(small):
    assert repr(small) == (
        "Plan(sequential: 6 pieces of 5 documents in 4 rows of 8 tokens, fill 0.7500, padding 8, split 1)"
    )


def test_a_plan_cannot_be_changed(small):
    for copied in (small, copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert copied == small
        with pytest.raises(ValueError, match="read-only"):
            copied.documents[0] = 3
        with pytest.raises(AttributeError):
            copied.max_length = 3


def test_offsets_of_documents_that_are_not_cut_take_no_memory():
    found = plan(flan_like(1000), 4096, ranks=8, cost=CostModel())
    assert found.offsets.strides == (0,)


def test_save_and_load(small, tmp_path):
    for index, made in enumerate((small, plan(flan_like(100), 4096))):
        made.save(tmp_path / f"{index}.plan")
        assert Plan.load(tmp_path / f"{index}.plan") == made


def test_plot(small, tmp_path, monkeypatch):
    figure = small.plot()
    assert len(figure.axes) == 2
    figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"autopack\[plot\]"):
        small.plot()


# Bad input


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "found none"),
        ([3, 0, 0], r"lengths\[1\] is 0 \(and 1 more\): wanted at least 1 token; leave empty"),
        ([3, -2], r"lengths\[1\] is -2: wanted at least 1"),
        ([3, 2.5], r"lengths\[1\] is 2.5: wanted an int"),
        (np.array([3.0, np.nan]), r"lengths\[0\] is 3.0"),
        ([float("nan"), 1], r"lengths\[0\] is nan"),
        ([1, None], r"lengths\[1\] is None"),
        ([1, "2"], r"lengths\[1\] is '2': wanted an int"),
        ([True, False], r"lengths\[0\] is True"),
        ([[1, 2, 3]], r"found shape \(1, 3\)"),
        ([[1, 2], [3]], "no array"),
        ([1, 2**32], r"lengths\[1\] is 4294967296: wanted at most 2,147,483,648 tokens; cut such documents"),
        ([1, 2**63, 2**64], r"lengths\[1\] is 9223372036854775808 \(and 1 more\): wanted at most"),
        ([1, 2**70], r"lengths\[1\] is 1180591620717411303424: wanted at most 2,147"),
        ("123", "found str"),
        ({0: 1}, "found dict"),
        (5, "found int"),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(InvalidPacking, match=message):
        plan(lengths, 8)


@pytest.mark.parametrize(
    "lengths",
    [(3, 1), range(1, 3), iter([3, 1]), np.array([3, 1], np.uint8), torch.tensor([3, 1]), np.array([3, 1], ">i2")],
)
def test_lengths_in_any_container(lengths):
    assert plan(lengths, 8).tokens_per_row.sum() in (3, 4)


def test_lengths_in_a_column_of_a_dataset():
    column = pytest.importorskip("datasets").Dataset.from_dict({"length": [3, 1]})["length"]
    assert plan(column, 8) == plan([3, 1], 8)
