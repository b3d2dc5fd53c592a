"""Packed streams: rows as the stream goes, no more held than a buffer, and the same rows after a
stop."""

import pickle
from itertools import islice

import datasets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopack
from tests.packing.batches import pieces

LONGEST, CAPACITY, BUFFER = 12, 24, 20


def document(number):
    """A document whose tokens tell which one it is: (number, place), of a length that looks
    random."""
    return [number * 100 + place for place in range(1 + number * 7919 % LONGEST)]


def generate(shards):
    for shard in shards:
        for number in range(shard * 1000, shard * 1000 + 50):
            yield {"input_ids": document(number), "kind": number % 3}


def stream(shuffled=False, shards=2):
    found = datasets.IterableDataset.from_generator(
        generate, gen_kwargs={"shards": list(range(shards))}
    )
    return found.shuffle(seed=3, buffer_size=16) if shuffled else found


def rows_of(dataset, **options):
    return autopack.pack(dataset, CAPACITY, **{"buffer_size": BUFFER, **options})


def documents_of(rows):
    found = []
    for row in rows:
        assert len(row["input_ids"]) <= CAPACITY
        assert row["position_ids"] == [t for n in row["seq_lengths"] for t in range(n)]
        found += zip(pieces(row), row["kind"], strict=True)
    return found


def numbers_of(rows):
    """The numbers of all documents."""
    return [ids[0] // 100 for ids, _ in documents_of(rows)]


def test_rows_follow_the_stream_and_are_mixed_in_a_buffer():
    numbers = numbers_of(rows_of(stream()))
    order = [each["input_ids"][0] // 100 for each in stream()]
    windows = [order.index(number) // BUFFER for number in numbers]
    assert windows == sorted(windows)
    assert windows.count(0) == BUFFER
    longest = [row["seq_lengths"][0] for row in islice(rows_of(stream()), 5)]
    assert longest != sorted(longest, reverse=True)  # a plan lists the longest first
    assert numbers_of(rows_of(stream(), seed=1)) != numbers


@given(stop=st.integers(1, 40), again=st.integers(1, 12), epoch=st.integers(0, 1))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_a_stream_that_is_stopped_goes_on_with_the_same_rows(stop, again, epoch):
    rows = rows_of(stream())
    rows.set_epoch(epoch)
    whole = list(rows)
    stop = min(stop, len(whole))
    found = list(islice(rows, stop))
    state = pickle.loads(pickle.dumps(rows.state_dict()))
    for part in (again, None):  # stopped twice
        rows = rows_of(stream())
        rows.set_epoch(epoch)
        rows.load_state_dict(state)
        found += islice(rows, part)
        state = rows.state_dict()
    assert found == whole
    rows.set_epoch(epoch + 1)  # the epoch after the one that was resumed is whole
    assert len(documents_of(rows)) == 100


def test_documents_that_are_dropped_leave_a_buffer_empty_and_the_stream_goes_on(caplog):
    made = [{"input_ids": [n] * (99 if n < 5 else 2), "kind": 0} for n in range(9)]
    rows = rows_of(
        datasets.IterableDataset.from_generator(lambda: iter(made)), overflow="drop", buffer_size=2
    )
    assert sorted(n for ids, _ in documents_of(rows) for n in set(ids)) == [5, 6, 7, 8]
    assert caplog.text.count("dropped 2") == 1
