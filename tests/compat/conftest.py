"""The model types and attention implementations of scenarios, and what these record for
compat/scenarios.py."""

import os
import sys
from pathlib import Path

import pytest

# compat/ is not installed with autopack.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autopack import tiny
from compat import matrix
from compat.matrix import load_matrix
from compat.scenarios import FILES, TYPES_VARIABLE
from compat.standins import supported_implementations

_NAMES = {Path(name).name for name in FILES}


def cells():
    """The chosen types that the installed release has, each with eager and sdpa as far as its class
    declares them."""
    chosen = os.environ.get(TYPES_VARIABLE)
    types = load_matrix().deep if chosen is None else chosen.split(",")
    there = [name for name in types if name in tiny.types_for("causal-lm")]
    return [
        (name, mode)
        for name in there
        for mode in ("eager", "sdpa")
        if mode in supported_implementations(tiny.build(name))
    ]


def pytest_generate_tests(metafunc):
    """Every scenario that takes a model type and a mode is run for each cell."""
    if metafunc.definition.path.name in _NAMES and {"model_type", "mode"} <= set(
        metafunc.fixturenames
    ):
        found = cells()
        metafunc.parametrize(("model_type", "mode"), found, ids=["/".join(cell) for cell in found])


@pytest.fixture
def stock(model_type, mode):
    """A tiny random model that autopack has not touched."""
    return tiny.build(model_type, attn_implementation=mode)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """An empty directory in the place of compat/results."""
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    (tmp_path / "releases").mkdir()
    return tmp_path
