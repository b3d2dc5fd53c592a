"""Plans: every document once, no row over its max_length, best fit as the textbook has it, and bad
input by name."""

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from autopack import InvalidPacking
from autopack.packing import CostModel, Plan, plan
from benchmarks.planning import imbalance
from tests.packing.batches import flan_like
from tests.support.refusals import refused

WHOLE = ("best_fit", "sequential")
ATTENTION = CostModel(0, 1)


@st.composite
def asked(draw, over=1):
    """Lengths, and a max_length of which none has more than `over`; the larger ones need several
    words of the index."""
    max_length = draw(st.sampled_from([1, 2, 7, 30, 64, 20_000, (1 << 31) - 1]))
    least = draw(st.sampled_from([1, max(1, max_length // 9), max_length // 3 + 1]))
    sizes = st.integers(least, min(over * max_length, (1 << 31) - 1))
    of = draw(st.lists(sizes, min_size=1, max_size=draw(st.sampled_from([1, 2, 80]))))
    return draw(st.lists(st.sampled_from(of), min_size=1, max_size=100)), max_length


# What every strategy keeps


@pytest.mark.parametrize("strategy", WHOLE)
@given(
    asked(over=2),
    st.sampled_from(["truncate", "split", "drop"]),
    st.integers(0, 3),
    st.sampled_from([None, 1, 2, 5]),
    st.integers(1, 5),
    st.sampled_from([None, CostModel(), ATTENTION]),
)
def test_every_token_once_and_no_row_over_its_limits(
    strategy, given, overflow, seed, limit, ranks, cost
):
    lengths, max_length = given
    options = {"overflow": overflow, "seed": seed, "max_documents": limit}
    rows = len(plan(lengths, max_length, strategy, **options))
    options |= {"ranks": ranks} if strategy == "sequential" else {"ranks": ranks, "cost": cost}
    found = plan(lengths, max_length, strategy, **options)
    assert found == plan(lengths, max_length, strategy, **options)

    kept = [0] * len(lengths)
    pieces = zip(
        found.documents.tolist(), found.offsets.tolist(), found.lengths.tolist(), strict=True
    )
    for document, offset, length in sorted(pieces):
        assert offset == kept[document]
        kept[document] += length
    over = [number for number, n in enumerate(lengths) if n > max_length]
    left = {"truncate": max_length, "split": (1 << 31) - 1, "drop": 0}[overflow]
    assert kept == [min(n, left) if n > max_length else n for n in lengths]
    counts = found.counts
    assert (counts.documents, counts.tokens) == (len(lengths), sum(lengths))
    assert counts.truncated_tokens + counts.dropped_tokens == sum(lengths) - sum(kept)
    assert {"truncate": counts.truncated, "split": counts.split, "drop": counts.dropped} == {
        way: len(over) * (way == overflow) for way in ("truncate", "split", "drop")
    }
    if over:
        with refused(
            "does-not-fit",
            match=rf"lengths\[{over[0]}\] is {lengths[over[0]]}, over the {max_length}",
        ):
            plan(lengths, max_length, strategy)

    of_rows = [int(found.lengths[found.pieces(row)].sum()) for row in range(len(found))]
    assert of_rows == found.columns_per_row.tolist() == found.tokens_per_row.tolist()
    assert all(0 < each <= max_length for each in of_rows)
    assert len(found) * max_length == found.padding + found.lengths.sum()
    assert max(np.diff(found.bounds), default=0) <= (limit or len(found.lengths))
    # Steps are complete wherever there are pieces enough to make them so.
    steps = -(-rows // ranks)
    assert len(found) == (steps * ranks if len(found.lengths) >= steps * ranks else rows)
    if strategy == "sequential":
        assert (np.diff(found.documents) >= 0).all()


@given(asked(), st.sampled_from([1, 2, 5, (1 << 31) - 1]))
def test_sequential_is_next_fit(given, limit):
    lengths, max_length = given
    wanted = [0]
    for index in range(len(lengths)):
        row = lengths[wanted[-1] : index + 1]
        if len(row) > limit or sum(row) > max_length:
            wanted.append(index)
    found = plan(lengths, max_length, "sequential", max_documents=limit)
    assert (found.bounds.tolist(), found.documents.tolist()) == (
        [*wanted, len(lengths)],
        [*range(len(lengths))],
    )


@given(asked())
def test_best_fit_has_the_rows_of_best_fit_decreasing(given):
    lengths, max_length = given
    wanted = []
    for size in sorted(lengths, reverse=True):
        fitting = [row for row in wanted if row + size <= max_length]
        if fitting:
            wanted.remove(max(fitting))
        wanted.append(size + max(fitting, default=0))
    assert sorted(plan(lengths, max_length).tokens_per_row.tolist()) == sorted(wanted)


def test_the_same_seed_gives_the_same_plan_everywhere():
    lengths = [5, 3, 3, 8, 1, 2, 2, 9, 4, 4]
    found = {
        s: [row.tolist() for row in plan(lengths, 10, s, seed=7, ranks=2)]
        for s in ("best_fit", "sequential")
    }
    found["by cost"] = [
        row.tolist() for row in plan(lengths, 10, seed=7, ranks=2, cost=CostModel())
    ]
    assert found == PINNED
    assert plan(lengths, 10, seed=7) != plan(lengths, 10, seed=8)


PINNED = {
    "best_fit": [[7], [3, 6], [0, 9, 4], [8, 2], [1], [5]],
    "by cost": [[3, 6], [0, 9, 4], [1], [5], [7], [8, 2]],
    "sequential": [[0, 1], [2], [3, 4], [5, 6], [7], [8, 9]],
}


# Balance


def test_eight_ranks_have_like_work_in_every_step():
    lengths = flan_like(100_000)
    costs = plan(lengths, 4096, cost=ATTENTION, ranks=8).costs(ATTENTION)
    steps = costs.reshape(-1, 8)
    assert steps.max(axis=1).sum() / steps.mean(axis=1).sum() <= 1.002
    assert (imbalance(costs, 8) > 1.05).sum() <= 3, (
        "those of the cheapest rows, of which some are divided"
    )
    # Control: without a cost the slowest rank of a random step has more than twice the mean.
    drawn = plan(lengths, 4096, "sequential", ranks=8)
    assert imbalance(drawn.costs(ATTENTION), 8).mean() > 2


def test_balance_does_not_leave_steps_in_the_order_of_their_cost():
    costs = plan(flan_like(20_000), 4096, cost=ATTENTION, ranks=8).costs(ATTENTION).reshape(-1, 8)
    order = np.arange(len(costs))
    assert abs(np.corrcoef(order, costs.mean(axis=1))[0, 1]) < 0.2


def test_cost_model():
    assert CostModel(2, 0.5)([1, 4]).tolist() == [2.5, 16.0]
    assert CostModel.for_model(LlamaConfig(hidden_size=1024)) == CostModel(1.0, 1 / (12 * 1024))
    for wrong in ((-1, 1), (0, 0), (float("nan"), 1), (True, 1)):
        with pytest.raises(ValueError, match="wanted a"):
            CostModel(*wrong)
    with pytest.raises(ValueError, match="hidden_size"):
        CostModel.for_model(object())


# The value


def test_rows_slices_and_iteration():
    small = plan([5, 3, 3, 12, 1], 8, "sequential", overflow="split")
    assert [row.tolist() for row in small] == [[0, 1], [2], [3], [3, 4]]
    assert small[-1].tolist() == [3, 4]
    assert small[0].dtype == np.int64
    assert [row.tolist() for row in small[1:]] == [[2], [3], [3, 4]]
    assert small[3:].offsets.tolist() == [8, 0]
    assert small.select([3, 0]).tokens_per_row.tolist() == [5, 8]
    for row in (4, -5):
        with pytest.raises(IndexError, match="range"):
            small[row]
    assert "6 pieces of 5 documents in 4 rows of 8 tokens, fill 0.7500, padding 8, split 1" in repr(
        small
    )
    assert pickle.loads(pickle.dumps(small)) == small != small[::-1]


def test_a_plan_is_kept_whole(tmp_path):
    made = plan([5, 6, 7], 16, groups=[0, 0, 1], prefixes=[3, 3, 1])
    made.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert again == made
    assert (again[::-1].columns_per_row == made.columns_per_row[::-1]).all()


# Bad input


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "found none"),
        ([3, 0, 0], r"lengths\[1\] is 0: wanted at least 1 token, .* leave such"),
        ([3, 2.5], r"lengths\[1\] is 2.5: wanted an int"),
        (np.array([3.0, np.nan]), r"lengths\[0\] is 3.0"),
        ([True, False], r"lengths\[0\] is True"),
        ([[1, 2], [3]], "no array"),
        (
            [1, 2**32],
            r"lengths\[1\] is 4294967296: wanted at least 1 token, and at most 2,147,483,647; leave",
        ),
        ([1, 2**63, 2**64], r"lengths\[1\] is 9223372036854775808: wanted at least 1 token"),
        ("123", "found shape"),
        (Dataset.from_dict({"ids": [[5, 6, 7]] * 3})["ids"], r"found shape \(3, 3\); pass len"),
    ],
)
def test_bad_lengths_are_named(lengths, message):
    with pytest.raises(InvalidPacking, match=message):
        plan(lengths, 8)


@pytest.mark.parametrize(
    "lengths",
    [
        iter([3, 1]),
        range(3, 0, -2),
        np.array([3, 1], np.uint8),
        np.array([3, 1], ">i2"),
        torch.tensor([3, 1]),
        Dataset.from_dict({"length": [3, 1]})["length"],
    ],
)
def test_lengths_in_any_container(lengths):
    assert plan(lengths, 8) == plan([3, 1], 8)
