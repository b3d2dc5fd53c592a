"""Padding: out of the batch and back, whatever the mask."""

from __future__ import annotations

import numpy as np
import torch

from autopack.calls.rows import row_sizes
from autopack.layout.packed import rows_as_documents
from autopack.layout.token_map import TokenMap

CPU = torch.device("cpu")


def test_first_positions_are_those_of_the_first_real_tokens():
    real = np.array([[0, 1, 1], [1, 0, 1]], bool)
    layout = rows_as_documents(real, CPU, np.array([[9, 4, 5], [7, 9, 8]]))
    assert layout.first_positions.tolist() == [4, 7]


def test_a_row_has_another_shape_than_the_batch_that_its_head_names():
    """ModernBERT's heads hand on the shape of their batch up to 5.0: masks are made of it."""
    padding = TokenMap.of_real(np.array([[1, 1, 1], [1, 0, 0]], bool), CPU)
    assert row_sizes({"batch_size": 2, "seq_len": 3, "rows": 2}, padding) == {"batch_size": 1, "seq_len": 4}
    assert row_sizes({"batch_size": None, "seq_len": torch.ones(3)}, padding) == {}
