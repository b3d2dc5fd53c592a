"""What rows begin with in common is found, and laid out so that every token stands there once."""

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopack.calls import prefixes
from autopack.layout.packed import rows_as_documents

CPU = torch.device("cpu")


def numbered(real, positions):
    """Positions; without any, a token has the number of its column."""
    return np.broadcast_to(np.arange(real.shape[1]), real.shape) if positions is None else positions


def find(tokens, real, positions, least, share):
    """What the rows of a padded batch have in common."""
    numbers = numbered(real, positions)
    layout = partial(rows_as_documents, real, CPU, positions)
    return prefixes.find(tokens[real], numbers[real], real.sum(1), layout, least, share)


@st.composite
def batches(draw):
    """Tokens of few kinds, so that rows begin alike, real ones among them, and positions or None."""
    rows, columns = draw(st.integers(2, 7)), draw(st.integers(1, 12))
    tokens = np.array(draw(st.lists(st.integers(0, 1), min_size=rows * columns, max_size=rows * columns)))
    lengths = np.array(draw(st.lists(st.integers(1, columns), min_size=rows, max_size=rows)))
    real = np.arange(columns) < lengths[:, None]
    if draw(st.booleans()):
        real = real[:, ::-1].copy()
    positions = np.maximum(real.cumsum(1) - 1, 0) if draw(st.booleans()) else None
    return tokens.reshape(rows, columns), real, positions


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 4))
def test_every_document_is_its_stretches_and_nothing_stands_twice(batch, least):
    tokens, real, positions = batch
    found = find(tokens, real, positions, least, 0.0)
    pairs = zip(tokens, numbered(real, positions), real, strict=True)
    documents = [list(zip(ids[own], numbers[own], strict=True)) for ids, numbers, own in pairs]
    if found is None:
        if least == 1:  # no two of them begin with the same token at the same position
            assert len({document[0] for document in documents}) == len(documents)
        return
    flat = [pair for document in documents for pair in document]
    row = [flat[first] for first in found.row.sources[0]]
    assert [row[column] for column in found.columns] == flat
    for stretch, chain in zip(found.stretches, found.chains, strict=True):
        assert sum(found.stretches[number].length for number in chain) == stretch.depth + stretch.length
    if least == 1:  # the tree of all beginnings: each of them stands there once
        beginnings = {tuple(document[: end + 1]) for document in documents for end in range(len(document))}
        assert found.tokens == len(beginnings)
    shared = [s for n, s in enumerate(found.stretches) if any(o.parent == n for o in found.stretches)]
    assert all(stretch.length >= least for stretch in shared)


def test_too_little_in_common_is_nothing():
    tokens, real = np.tile(np.arange(40), (2, 1)), np.ones((2, 40), dtype=bool)
    tokens[1, 8:] += 100
    assert find(tokens, real, None, 16, 0.1) is None
    assert find(tokens, real, None, 8, 0.11) is None
    assert find(tokens, real, None, 8, 0.1).saved == 8


def test_many_rows_one_below_the_other():
    """A tree as deep as there are rows is built without recursion."""
    rows = 1500
    real = np.arange(rows) < np.arange(1, rows + 1)[:, None]
    found = find(np.ones((rows, rows), dtype=np.int64), real, None, 1, 0.0)
    assert found.tokens == rows
    assert len(found.stretches) == rows
