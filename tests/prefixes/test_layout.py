"""What rows begin with in common is found, and laid out so that every token stands there once."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopack.calls import prefixes
from autopack.layout.packed import rows_as_documents
from autopack.layout.prefixes import Prefixes


def find(tokens, real, least, share):
    """What the rows of a padded batch have in common; a token has the number of its column."""
    columns = np.broadcast_to(np.arange(real.shape[1]), real.shape)
    found = prefixes.find(tokens[real], columns[real], real.sum(1), least, share)
    layout = rows_as_documents(real, torch.device("cpu"))
    return None if found is None else Prefixes(*found, layout.device, layout)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=7),
    st.integers(1, 4),
)
def test_every_document_is_its_stretches_and_nothing_stands_twice(rows, least):
    """Tokens are of few kinds, so that rows begin alike."""
    columns = max(map(len, rows))
    real = np.array([[column < len(row) for column in range(columns)] for row in rows])
    found = find(np.array([row + [0] * (columns - len(row)) for row in rows]), real, least, 0.0)
    documents = [list(enumerate(row)) for row in rows]
    if found is None:
        if least == 1:  # no two of them begin with the same token
            assert len({row[0] for row in rows}) == len(rows)
        return
    flat = [pair for document in documents for pair in document]
    row = [flat[first] for first in found.row.sources[0]]
    assert [row[column] for column in found.columns] == flat
    for stretch in found.stretches:
        assert (
            sum(found.stretches[number].length for number in stretch.chain)
            == stretch.depth + stretch.length
        )
    if least == 1:  # the tree of all beginnings: each of them stands there once
        assert found.tokens == len(
            {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        )
    shared = [
        s for n, s in enumerate(found.stretches) if any(n in o.chain[:-1] for o in found.stretches)
    ]
    assert all(stretch.length >= least for stretch in shared)


def test_too_little_in_common_is_nothing():
    tokens, real = np.tile(np.arange(40), (2, 1)), np.ones((2, 40), dtype=bool)
    tokens[1, 8:] += 100
    assert find(tokens, real, 16, 0.1) is None
    assert find(tokens, real, 8, 0.11) is None
    assert find(tokens, real, 8, 0.1).saved == 8


def test_many_rows_one_below_the_other():
    """A tree as deep as there are rows is built without recursion."""
    rows = 1500
    real = np.arange(rows) < np.arange(1, rows + 1)[:, None]
    found = find(np.ones((rows, rows), dtype=np.int64), real, 1, 0.0)
    assert found.tokens == rows
    assert len(found.stretches) == rows
