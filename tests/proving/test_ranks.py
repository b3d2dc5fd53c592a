"""Threads that share rows as ranks do."""

import pytest
import torch

from autopack.proving.apart import ranks_of_threads, run_together


def exchanges(group, counts):
    return [
        float(group.gather(torch.tensor(float(group.rank))).sum())
        for _ in range(counts[group.rank])
    ]


def test_each_gets_what_all_bring():
    assert (
        run_together(ranks_of_threads(3), lambda group: exchanges(group, [2] * 3))
        == [[3.0, 3.0]] * 3
    )


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (0, 3)])
def test_ranks_that_do_not_exchange_alike_do_not_wait_for_each_other(counts):
    with pytest.raises(RuntimeError, match="do not exchange as often"):
        run_together(ranks_of_threads(2), lambda group: exchanges(group, counts))


def test_what_one_raises_is_raised():
    def work(group):
        if group.rank == 1:
            raise KeyError("of rank 1")
        return exchanges(group, (5, 0))

    with pytest.raises(KeyError, match="of rank 1"):
        run_together(ranks_of_threads(2), work)
