"""Padding: out of the batch and back, whatever the mask."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from autopack.calls.rows import row_sizes
from autopack.layout.packed import rows_as_documents
from autopack.layout.token_map import TokenMap

CPU = torch.device("cpu")
masks = arrays.arrays(bool, st.tuples(st.integers(1, 5), st.integers(1, 12))).filter(lambda m: m.any(axis=1).all())


@given(masks)
def test_restoring_what_was_gathered_gives_the_batch_with_zeros_at_padding(real):
    padding = TokenMap.of_real(real, CPU)
    batch = torch.randn(*real.shape, 3)
    row = padding.gather(batch)
    assert row.shape == (1, real.sum(), 3)
    assert torch.equal(padding.restore(row), batch * torch.from_numpy(real)[..., None])
    assert torch.equal(padding.restore(row[0], axis=0).reshape(batch.shape), padding.restore(row))


@given(masks)
def test_the_layout_is_one_row_with_one_document_per_row_of_the_batch(real):
    layout = rows_as_documents(real, CPU)
    assert (layout.rows, layout.columns) == (1, real.sum())
    assert layout.lengths == tuple(real.sum(axis=1))


@given(masks)
def test_what_the_mask_says(real):
    padding = TokenMap.of_real(real, CPU)
    rows = ["".join("x" if token else "." for token in row) for row in real]
    assert padding.shape == real.shape
    assert padding.tokens == real.sum()
    assert padding.on_the_right == all("." not in row.rstrip(".") for row in rows)
    assert padding.has_holes == any("." in row.strip(".") for row in rows)
    places = [(r, c) for r, row in enumerate(rows) for c, token in enumerate(row) if token == "x"]
    after_padding = [n for n, (r, c) in enumerate(places) if c == 0 or rows[r][c - 1] == "."]
    assert padding.unpredicted.tolist() == after_padding


def test_first_positions_are_those_of_the_first_real_tokens():
    real = np.array([[0, 1, 1], [1, 0, 1]], bool)
    layout = rows_as_documents(real, CPU, np.array([[9, 4, 5], [7, 9, 8]]))
    assert layout.first_positions.tolist() == [4, 7]


def test_both_ways_are_differentiable():
    padding = TokenMap.of_real(np.array([[1, 0, 1], [1, 1, 0]], bool), CPU)
    batch = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b: padding.restore(padding.gather(b).sin()), batch)


def test_a_row_has_another_shape_than_the_batch_that_its_head_names():
    """ModernBERT's heads hand on the shape of their batch up to 5.0: masks are made of it."""
    padding = TokenMap.of_real(np.array([[1, 1, 1], [1, 0, 0]], bool), CPU)
    assert row_sizes({"batch_size": 2, "seq_len": 3, "rows": 2}, padding) == {"batch_size": 1, "seq_len": 4}
    assert row_sizes({"batch_size": None, "seq_len": torch.ones(3)}, padding) == {}
