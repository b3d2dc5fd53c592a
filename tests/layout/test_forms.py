"""What a value has something for: its shape says it, or one line of a table by its name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack.layout.forms import Frame
from autopack.layout.ways import Of

FRAME = Frame(2, 7, documents=5, labels=("labels",))


@pytest.mark.parametrize(
    ("name", "value", "unit", "axis"),
    [
        ("input_ids", torch.zeros(2, 7), Of.TOKEN, 1),
        ("position_ids", torch.zeros(1, 7), Of.TOKEN, 1),
        ("decoder_position_ids", torch.zeros(1, 7), Of.TOKEN, 1),
        ("position_ids", torch.zeros(3, 2, 7), Of.TOKEN, 2),
        ("position_ids", torch.zeros(3, 1, 7), Of.TOKEN, 2),
        ("table", torch.zeros(1, 7), Of.UNKNOWN, None),
        ("labels", torch.zeros(5), Of.DOCUMENT, None),
        ("labels", torch.zeros(2, 7), Of.UNKNOWN, None),
        ("scale", torch.zeros(()), Of.CALL, None),
        ("scale", torch.zeros(1), Of.CALL, None),
        ("return_dict", True, Of.CALL, None),
        ("names", ["a", "b"], Of.CALL, None),
        ("states", [torch.zeros(2, 7)], Of.UNKNOWN, None),
        ("states", {"of": torch.zeros(2, 7)}, Of.UNKNOWN, None),
    ],
    ids=str,
)  # fmt: skip
def test_arguments(name, value, unit, axis):
    assert FRAME.unit_of(name, value) is unit
    assert FRAME.axis_of(name, value) == axis


def test_positions_in_as_many_sections_as_rows_have_columns():
    assert Frame(3, 3).axis_of("position_ids", torch.zeros(3, 3, 3)) == 2
    assert Frame(3, 3).unit_of("position_ids", torch.zeros(3, 2, 3)) is Of.UNKNOWN


def test_one_row_that_is_the_same_for_all():
    shared = Frame(2, 7, shared=True)
    assert shared.axis_of("table", torch.zeros(1, 7, 3)) == 1
    seen = []
    shared.changed("table", torch.arange(7)[None], lambda value: seen.append(value.tolist()) or value)
    assert seen == [[list(range(7))] * 2]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_each_kind_of_positions_is_changed_by_itself(rows, columns, kinds):
    value = torch.randn(kinds, rows, columns)
    found = Frame(rows, columns).changed("position_ids", value, lambda part: part.flip(1))
    assert torch.equal(found, value.flip(2))
