"""Files and states from elsewhere: what is broken or hostile is an `InvalidPacking`, and nothing in
it is run."""

import json
import pickle

import numpy as np
import pytest
import torch

import autopack
from autopack import InvalidPacking
from autopack.bench.subjects import FILES
from autopack.packing import Plan
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
    "mixed": b'[{"length": 1}, 2, null]',
    "no list": b"17",
}
LINES = "text in numbers, not a number, infinite, negative, huge, mixed, no list".split(", ")
"""Each a line that is an example: tokens, or a length."""


@pytest.mark.parametrize(
    ("suffix", "name"),
    [(s, name) for s in FILES for name in CONTENTS if s != ".jsonl" or name not in LINES],
)
def test_lengths(tmp_path, suffix, name):
    path = tmp_path / f"lengths{suffix}"
    path.write_bytes(CONTENTS[name])
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


def saved(tmp_path, **changes):
    """A plan in a file, some of whose parts are others."""
    plan = autopack.packing.plan([3, 5, 2, 7], 8)
    path = tmp_path / "plan.npz"
    plan.save(path)
    with np.load(path) as file:
        parts = dict(file)
    meta = json.loads(str(parts["meta"]))
    for name, value in changes.items():
        (parts if name in parts else meta)[name] = value
    if "meta" not in changes:
        parts["meta"] = np.array(json.dumps(meta))
    np.savez(path, **{name: value for name, value in parts.items() if value is not None})
    return path


BROKEN = {
    "no documents": {"documents": None},
    "objects": {"documents": np.array([Runs()], object)},
    "floats": {"lengths": np.array([3.0, np.nan, 2.0, 7.0])},
    "negative": {"lengths": np.array([3, -5, 2, 7])},
    "negative documents": {"documents": np.array([-1, 0, 1, 2])},
    "too many axes": {"lengths": np.ones((4, 1), np.int64)},
    "no bounds": {"bounds": np.zeros(0, np.int64)},
    "bounds beyond": {"bounds": np.array([0, 1 << 40])},
    "rows over their length": {"bounds": np.array([0, 4])},
    "lengths over their rows": {"lengths": np.array([9, 9, 9, 9])},
    "capacity": {"capacity": "a lot"},
    "capacity above": {"capacity": 1 << 70},
    "align": {"align": 0},
    "counts": {"counts": {"documents": 4, "what": 1}},
    "an unknown field": {"what": 1},
    "meta is no object": {"meta": np.array("[1]")},
    "meta is nested": {"meta": np.array("[" * 100_000)},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN.keys())
def test_plans(tmp_path, changes):
    assert len(Plan.load(saved(tmp_path))) > 0
    with refused("other-data"):
        Plan.load(saved(tmp_path, **changes))


@pytest.mark.parametrize("content", [*CONTENTS.values(), b"PK\x03\x04" + b"\x00" * 60])
def test_files_that_hold_no_plan(tmp_path, content):
    path = tmp_path / "plan.npz"
    path.write_bytes(content)
    with refused("other-data"):
        Plan.load(path)
    whole = saved(tmp_path).read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with refused("other-data"):
            Plan.load(path)


NUMBERS = [-1, 1.5, float("nan"), "3", None, [1], True, 1 << 70]


@pytest.mark.parametrize(
    "state",
    [
        *(None, 3, "state", [], {}, {"epoch": 0, "step": 0, "made_of": 3}),
        # an epoch may be as large as it wants
        *({"changed": {"epoch": value}} for value in NUMBERS[:-1]),
        *({"changed": {"step": value}} for value in NUMBERS),
        {"changed": {"epoch": 1, "step": 999}},
    ],
)
def test_states_of_a_sampler(state):
    sampler = autopack.PackedBatchSampler([3, 5, 2, 7], 8)
    before = list(sampler)
    changed = state.get("changed") if isinstance(state, dict) else None
    with refused("other-data"):
        sampler.load_state_dict(sampler.state_dict() | changed if changed else state)
    assert list(sampler) == before
