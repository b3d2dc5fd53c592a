"""Every document is dealt once, no micro-batch has too many tokens, and ranks have the same to
do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopack.packing.strategies import CostModel
from autopack.steps.deal import deal


@st.composite
def steps(draw):
    ranks = draw(st.integers(1, 5))
    homes = sorted([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=40))])
    return (
        ranks,
        homes,
        draw(st.lists(st.integers(1, 300), min_size=len(homes), max_size=len(homes))),
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps(), st.integers(1, 400), st.booleans())
def test_every_document_is_dealt_once_within_the_budget(step, most, moves):
    ranks, homes, lengths = step
    dealt = deal(lengths, homes, ranks, most, CostModel(), moves)
    assert sorted(n for rows in dealt for row in rows for n in row) == list(range(len(lengths)))
    assert [len(rows) for rows in dealt] == ranks * [len(dealt[0])]
    assert all(
        sum(lengths[n] for n in row) <= most for rows in dealt for row in rows if len(row) > 1
    )
    assert len(dealt[0]) <= len(lengths)
    assert moves or all(
        homes[n] == rank for rank, rows in enumerate(dealt) for row in rows for n in row
    )


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_slowest_rank_has_little_more_to_do_than_the_mean(ranks):
    draw, cost = np.random.default_rng(ranks), CostModel()
    lengths = np.clip(draw.lognormal(5.7, 0.93, 16 * ranks), 8, 2048).astype(int)
    dealt = deal(lengths, np.arange(len(lengths)) % ranks, ranks, 4096, cost)
    costs = [sum(float(cost(lengths[n])) for row in rows for n in row) for rows in dealt]
    assert max(costs) <= 1.03 * np.mean(costs)


def test_documents_stay_where_they_are_if_that_is_as_good():
    homes = [1, 1, 0, 0]
    dealt = deal([9, 2, 10, 1], homes, 2, 100, CostModel())
    assert [sorted(homes[n] for row in rows for n in row) for rows in dealt] == [[0, 0], [1, 1]]
