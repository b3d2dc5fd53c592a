"""Columns of any sort: a packed row has them as the documents had them, or packing names one that
it cannot keep."""

from functools import partial

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopack
from autopack import InvalidPacking, PackingCollator
from tests.packing.batches import KINDS, documents_of, of_kind, pieces
from tests.support.refusals import refused

CAPACITY = 16

SCALARS = {
    "ints": st.integers(-(2**40), 2**40),
    "floats": st.integers(-1000, 1000).map(lambda eighths: eighths / 8),
    "bools": st.booleans(),
    "text": st.text(st.characters(codec="utf-8"), max_size=6),
    "bytes": st.binary(max_size=4),
}
NAMES = st.sampled_from(
    ["source", "label_of_mine", "kind", "image_mask", "weights", "a column", "ids"]
)


def per_token(value, length):
    return st.lists(value, min_size=length, max_size=length)


SORTS = {
    **{f"one of {name} per document": lambda n, v=value: v for name, value in SCALARS.items()},
    **{
        f"one of {name} per token": lambda n, v=value: per_token(v, n)
        for name, value in SCALARS.items()
        if name in ("ints", "floats", "bools")
    },
    "three floats per token": lambda n: per_token(per_token(SCALARS["floats"], 3), n),
    "words": lambda n: st.lists(SCALARS["text"], max_size=4),
    "a mapping": lambda n: st.fixed_dictionaries({"a": SCALARS["ints"], "b": SCALARS["text"]}),
    "any number of ints": lambda n: st.lists(SCALARS["ints"], max_size=5),
    "text or nothing": lambda n: st.none() | SCALARS["text"],
    "ints or nothing": lambda n: st.none() | SCALARS["ints"],
    "per token or nothing": lambda n: st.none() | per_token(SCALARS["ints"], n),
}


@st.composite
def data(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    sorts = draw(st.dictionaries(NAMES, st.sampled_from(sorted(SORTS)), max_size=3))
    made = []
    for number, length in enumerate(lengths):
        ids = [number * 100 + place for place in range(length)]
        made.append(
            {"input_ids": ids, **{name: draw(SORTS[sort](length)) for name, sort in sorts.items()}}
        )
    return made, sorts


def plain(value):
    """The value with lists for arrays."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(each) for each in value]
    return value


def check(rows, made, sorts):
    seen = []
    for row in rows:
        documents = [made[ids[0] // 100] for ids in pieces(row)]
        assert pieces(row) == [document["input_ids"] for document in documents]
        seen += documents
        for name, sort in sorts.items():
            values = [plain(document[name]) for document in documents]
            if name not in row:  # no document has a value
                assert all(each[name] is None for each in made)
            elif "per token" in sort or (
                "any number" in sort
                and all(len(each[name]) == len(each["input_ids"]) for each in made)
            ):
                assert plain(pieces(row, name)) == values, (name, sort)
            else:
                assert plain(row[name]) == values, (name, sort)
    assert len(seen) == len(made)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", KINDS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    drawn=data(),
    strategy=st.sampled_from(["best_fit", "sequential"]),
    buffer_size=st.sampled_from([3, 4096]),
)
def test_a_column_is_kept_as_it_was_or_refused_by_name(form, drawn, strategy, buffer_size):
    made, sorts = drawn
    try:
        given = of_kind(made, form)
    except Exception:
        return  # arrow has no type for such a column, so nobody has such a data set
    pack, said = partial(autopack.pack, given, CAPACITY, strategy, buffer_size=buffer_size), None
    try:
        rows = pack()
        list(rows)
    except InvalidPacking as error:
        rows, said = pack(drop_columns=list(sorts)), str(error)
    assert isinstance(rows, type(given))
    if strategy == "sequential":
        assert documents_of(rows) == [each["input_ids"] for each in made]
    if said is not None:
        refused = [name for name in sorts if repr(name) in said]
        assert refused, said
        assert any(mark in sorts[name] for name in refused for mark in ("nothing", "any number")), (
            said
        )
    check(rows, made, sorts if said is None else {})


IDS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def _dataset(**columns):
    return datasets.Dataset.from_dict({"input_ids": IDS, **columns})


@pytest.mark.parametrize("name", ["labels", "source"])
def test_a_buffer_without_a_value_is_no_buffer_without_the_column(name):
    """It would have rows with other columns than the next one's."""
    values = [None, None, [10, 11, 12, 13] if name == "labels" else "web"]
    stream = _dataset(**{name: values}).to_iterable_dataset()
    with refused("unusable-data", match=rf"column '{name}': found no value; fill it"):
        list(autopack.pack(stream, 5, buffer_size=2))
    rows = list(autopack.pack(stream, 5, buffer_size=2, drop_columns=(name,)))
    assert sorted(documents_of(rows)) == sorted(IDS)


def test_columns_have_names():
    """Numbers for names are no columns of a table, and two of them could become one."""
    example = {"input_ids": [1, 2], 3: 7, "3": 8}
    with refused(
        "unusable-data", match="wanted names that are text, found 3; rename it, or drop it"
    ):
        autopack.pack([example], 8)
    for value in (7, [1, 2], "text"):
        given = {"input_ids": [1, 2], 3: value}
        with refused(
            "unusable-data", match="example 0, wanted names that are text, found 3; rename it"
        ):
            PackingCollator()([given])
        assert PackingCollator(drop_keys=[3])([given])["input_ids"].tolist() == [[1, 2]]
