"""Bounds of documents (`cu_seq_lens`) that end before the padding at the end, which the mask marks."""

from __future__ import annotations

import pytest
import torch

from autopack.layout.declarations import read
from tests.support.refusals import refused


def _bounds(mask, bounds):
    given = {"attention_mask": torch.tensor(mask), "cu_seq_lens_q": torch.tensor(bounds)}
    layout = read(given, tuple(given["attention_mask"].shape), torch.device("cpu")).layout
    return None if layout is None else layout.bounds.tolist()


@pytest.mark.parametrize(
    ("mask", "bounds", "documents"),
    [
        ([1, 1, 1, 1, 1, 1, 0, 0], [0, 4, 6], [0, 4, 6, 8]),
        ([1, 1, 1, 1, 1, 1, 0, 0], [0, 4, 6, 6, 6], [0, 4, 6, 8]),
        ([1, 1, 1, 1, 1, 1, 0, 0], [0, 4, 7], [0, 4, 6, 8]),  # some of the padding is counted
        ([1, 1, 2, 2, 2, 2, 0, 0], [0, 2, 6], [0, 2, 6, 8]),
        ([1, 1, 1, 1, 1, 1, 0, 0], [0, 6], None),
    ],
)
def test_bounds_may_end_before_padding_that_the_mask_marks(mask, bounds, documents):
    assert _bounds([mask], bounds) == documents


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 1, 1, 1, 1, 1, 1, 0]],  # a token follows the last bound
        [[0, 1, 1, 1, 1, 1, 1, 1]],
        [[1, 1, 1, 0], [1, 1, 1, 0]],  # bounds that count tokens alone
    ],
)
def test_bounds_that_end_before_a_token_are_refused(rows):
    with refused("declaration-invalid"):
        _bounds(rows, [0, 3, 6])


def test_bounds_of_several_rows_may_end_before_the_padding_of_the_last():
    mask = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert _bounds(mask, [0, 2, 4, 6]) == [0, 2, 4, 6, 8, 10, 12]
