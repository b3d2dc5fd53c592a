"""The pictures of README are drawn from what the code does, and say what is so."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import autopack
from autopack import tiny

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tokens_of_other_documents_change_nothing_once_enabled(draw):
    number = np.repeat(np.arange(len(draw.LENGTHS)), draw.LENGTHS)
    across = number[:, None] != number[None, :]
    model = tiny.build("llama", attn_implementation="sdpa").eval()
    before = draw.influence(model)
    autopack.enable(model)
    after = draw.influence(model)
    behind = np.tril(across)
    assert (before[behind] > 1e-2).all(), "stock leaks from every document into those behind it"
    assert (after[across] == 0).all()
    assert (np.diagonal(after) > 1e-2).all()


def test_completions_change_nothing_but_themselves(draw):
    found = draw.influence_of_tree()
    number = np.repeat(np.arange(len(draw.RESTS) + 1), (draw.PROMPT, *draw.RESTS))
    sees = np.tril((number[:, None] == number[None, :]) | (number[None, :] == 0))
    assert (found[sees] > 1e-4).all()
    assert (found[~sees] == 0).all()


@pytest.mark.parametrize("name", ["packing", "plan", "prefixes"])
def test_every_picture_is_there_in_light_and_dark(draw, name):
    for theme in draw.THEMES:
        assert (DOCS / "images" / f"{name}-{theme}.png").stat().st_size > 10_000
        if name != "prefixes":
            assert f"docs/images/{name}-{theme}.png" in (DOCS.parent / "README.md").read_text()
    assert len(getattr(draw, name)(draw.THEMES["light"]).axes) == (2 if name == "prefixes" else 3)
