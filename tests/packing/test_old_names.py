"""`max_length` is the one word for the length of a row; what it was called before works for one release, and warns."""

from __future__ import annotations

import inspect
import json
import warnings

import numpy as np
import pytest

import autopack
from autopack.packing.plans import Plan

LENGTHS = [3, 5, 8, 2]


def test_arguments_by_their_old_names():
    with pytest.warns(FutureWarning, match="capacity is called max_length now"):
        assert len(autopack.packing.plan(LENGTHS, capacity=8)) == len(autopack.packing.plan(LENGTHS, max_length=8))
    with pytest.warns(FutureWarning, match="max_tokens is called max_length now"):
        sampler = autopack.PackedBatchSampler(LENGTHS, max_tokens=8)
    assert list(sampler) == list(autopack.PackedBatchSampler(LENGTHS, 8))
    with pytest.warns(FutureWarning):
        assert autopack.PackingCollator(max_tokens=8) == autopack.PackingCollator(max_length=8)
    with pytest.raises(TypeError, match="pass one of them"), pytest.warns(FutureWarning):
        autopack.PackingCollator(max_tokens=8, max_length=8)


def test_attributes_by_their_old_names():
    for made, name in (
        (autopack.packing.plan(LENGTHS, 8), "capacity"),
        (autopack.PackedBatchSampler(LENGTHS, 8), "max_tokens"),
        (autopack.PackingCollator(max_length=8), "max_tokens"),
    ):
        with pytest.warns(FutureWarning, match=name) as seen:
            assert getattr(made, name) == 8
        assert seen[0].filename == __file__


def test_nothing_warns_by_the_new_one_and_signatures_name_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (autopack.packing.plan(LENGTHS, 8), autopack.PackingCollator(max_length=8)):
            assert made.max_length == 8
    for function in (autopack.packing.plan, autopack.PackingCollator, autopack.PackedBatchSampler):
        names = inspect.signature(function).parameters
        assert "max_length" in names
        assert not {"capacity", "max_tokens"} & {*names}


def test_states_and_files_of_the_release_before(tmp_path):
    sampler = autopack.PackedBatchSampler(LENGTHS, 8)
    next(iter(sampler))
    state = sampler.state_dict()
    state["made_of"]["max_tokens"] = state["made_of"].pop("max_length")
    again = autopack.PackedBatchSampler(LENGTHS, 8)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert len(list(again)) == len(list(sampler)) - 1
    made = autopack.packing.plan(LENGTHS, 8)
    made.save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as file:
        assert json.loads(str(file["meta"]))["capacity"] == 8  # what every release reads
    assert Plan.load(tmp_path / "plan.npz").max_length == 8
