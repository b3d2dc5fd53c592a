"""PackedLayout: everything it says follows from where documents start."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack.layout.packed import rows_as_documents
from autopack.layout.token_map import TokenMap
from autopack.mixers.alone import square
from autopack.packing import PackedLayout
from tests.support.refusals import refused

CPU = torch.device("cpu")


@st.composite
def rows_of_lengths(draw):
    """Document lengths of one to three equally long rows."""
    columns = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, columns - 1), max_size=6)) if columns > 1 else set()
        rows.append(np.diff([0, *sorted(cuts), columns]).tolist())
    return rows


def _reference(rows):
    """Per token: number of its document, first column of its document, offset in it."""
    numbers, firsts, offsets, number = [], [], [], 0
    for lengths in rows:
        column = 0
        numbers.append([]), firsts.append([]), offsets.append([])
        for length in lengths:
            numbers[-1] += [number] * length
            firsts[-1] += [column] * length
            offsets[-1] += list(range(length))
            column, number = column + length, number + 1
    return numbers, firsts, offsets


@given(rows_of_lengths())
def test_every_view_agrees_with_the_lengths(rows):
    layout = PackedLayout.from_lengths(rows)
    numbers, firsts, offsets = _reference(rows)
    lengths = [n for row in rows for n in row]
    assert (layout.rows, layout.columns) == (len(rows), sum(rows[0]))
    assert layout.lengths == tuple(lengths)
    assert layout.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    assert layout.max_seqlen == max(lengths)
    assert layout.seq_idx.tolist() == numbers
    assert layout.starts.tolist() == firsts == layout.start_columns.tolist()
    assert layout.position_ids().tolist() == offsets
    assert layout.position_ids(2).tolist() == [[o + 2 for o in row] for row in offsets]
    flat = [row * layout.columns + c for row, first, end in layout.spans for c in range(first, end)]
    assert flat == list(range(layout.rows * layout.columns))
    assert [end - first for _, first, end in layout.spans] == lengths


@given(rows_of_lengths(), st.integers(1, 9))
def test_chunks_are_counted_from_the_start_of_each_document(rows, size):
    layout = PackedLayout.from_lengths(rows)
    chunked = layout.in_chunks(size)
    expected = [min(size, n - first) for n in layout.lengths for first in range(0, n, size)]
    assert list(chunked.lengths) == expected
    assert layout.in_chunks(size) is chunked


def test_chunks_of_two_sizes_are_two_layouts():
    layout = PackedLayout.from_lengths([[5, 3]])
    assert [layout.in_chunks(size).lengths for size in (2, 4, 2)] == [
        (2, 2, 1, 2, 1),
        (4, 1, 3),
        (2, 2, 1, 2, 1),
    ]


def test_first_positions_are_those_of_the_first_real_tokens_of_a_batch():
    real = np.array([[0, 1, 1], [1, 0, 1]], bool)
    layout = rows_as_documents(real, CPU, np.array([[9, 4, 5], [7, 9, 8]]))
    assert layout.first_positions.tolist() == [4, 7]


def test_first_positions_come_from_the_positions_of_the_call():
    starts = np.array([[True, False, True, False]])
    layout = PackedLayout.from_starts(starts, CPU, np.array([[5, 6, 0, 1]]), np.ones_like(starts))
    assert layout.first_positions.tolist() == [5, 0]


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same number of tokens; found \[5, 6\]"):
        PackedLayout.from_lengths([[2, 3], [2, 4]])


@pytest.mark.parametrize(
    "shape",
    [(2, 1, 6, 7), (1, 1, 9, 9), (3, 1, 7, 7), (2, 6)],
)
def test_a_mask_of_other_rows_is_not_cut(shape):
    """Such as that of the padded batch that the rows were: an index beyond it would be taken from
    its beginning."""
    layout = PackedLayout.from_lengths([[3, 4], [5, 2]])
    with refused("other-tokens"):
        square(TokenMap.of_documents(layout, np.array([1])), torch.zeros(shape))


@given(
    rows_of_lengths(),
    st.sampled_from([(), (3,), (2, 3)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_what_belongs_to_documents_is_what_stands_there(rows, between, one_row, more, wanted):
    """Masks and biases of any form, of one row or all, with a key more, with a gradient or
    without."""
    layout = PackedLayout.from_lengths(rows)
    columns = sum(rows[0])
    shape = (1 if one_row else len(rows), *between, columns, columns + more)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=wanted)
    for number, (row, first, end) in enumerate(layout.spans):
        found = square(TokenMap.of_documents(layout, np.array([number])), mask)
        assert torch.equal(found[0], mask[0 if one_row else row, ..., first:end, first:end])
