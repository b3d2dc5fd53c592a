"""Files and states from elsewhere: what is broken or hostile is an `InvalidPacking`, and nothing in it is run."""

import pickle

import numpy as np
import pytest
import torch

import autopack
from autopack import InvalidPacking
from autopack.bench.sources import FILES
from tests.support.refusals import refused

RAN = []


class Runs:
    """Notes that it was unpickled."""

    def __reduce__(self):
        return RAN.append, (1,)


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()
    yield
    assert RAN == []


def estimate(path):
    return autopack.estimate(str(path))


CONTENTS = {
    "nothing": b"",
    "a pickle": pickle.dumps(Runs()),
    "not text": b"\xff\xfe\x00\x80" * 8,
    "cut off": b'[1, 2, {"input_ids": [1,',
    "deeply nested": b"[" * 100_000,
    "an object": b'{"length": {"a": 1}}',
    "text in numbers": b'[1, "two", 3]',
    "not a number": b"[NaN, 1]",
    "infinite": b"[1e400]",
    "negative": b"[-5]",
    "huge": b"[" + b"9" * 400 + b"]",
    "null": b"null",
    "mixed": b'[{"length": 1}, 2, null]',
    "no list": b"17",
}
LINES = [
    CONTENTS[name] for name in ("text in numbers", "not a number", "infinite", "negative", "huge", "mixed", "no list")
]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("suffix", FILES)
def test_lengths(tmp_path, suffix, content):
    if suffix == ".jsonl" and content in LINES:
        pytest.skip("a line that is an example: tokens, or a length")
    path = tmp_path / f"lengths{suffix}"
    path.write_bytes(content)
    with pytest.raises(InvalidPacking):
        estimate(path)


@pytest.mark.parametrize("value", [Runs(), np.array([Runs()], object)], ids=["object", "array"])
def test_an_array_of_objects_is_not_unpickled(tmp_path, value):
    np.save(tmp_path / "objects.npy", value, allow_pickle=True)
    torch.save([1, 2, 3], tmp_path / "of-torch.npy")
    (tmp_path / "link.npy").symlink_to(tmp_path / "nowhere.npy")
    for name in ("objects", "of-torch", "link"):
        with refused("bad-file"):
            estimate(tmp_path / f"{name}.npy")


NUMBERS = [-1, 1.5, float("nan"), "3", None, [1], True, 1 << 70]


@pytest.mark.parametrize(
    "state",
    [
        *(None, 3, "state", [], {}, {"epoch": 0, "step": 0, "made_of": 3}),
        *({"changed": {"epoch": value}} for value in NUMBERS[:-1]),  # an epoch may be as large as it wants
        *({"changed": {"step": value}} for value in NUMBERS),
    ],
)
def test_states_of_a_sampler(state):
    sampler = autopack.PackedBatchSampler([3, 5, 2, 7], 8)
    before = list(sampler)
    changed = state.get("changed") if isinstance(state, dict) else None
    with refused("other-data"):
        sampler.load_state_dict(sampler.state_dict() | changed if changed else state)
    assert list(sampler) == before
