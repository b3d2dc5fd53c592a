"""The pictures of README are there, and are drawn from what the code does."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["packing", "plan", "prefixes"])
def test_every_picture_is_there_in_light_and_dark(draw, name):
    for theme in draw.THEMES:
        assert (DOCS / "images" / f"{name}-{theme}.png").stat().st_size > 10_000
        if name != "prefixes":
            assert f"docs/images/{name}-{theme}.png" in (DOCS.parent / "README.md").read_text()
    assert len(getattr(draw, name)(draw.THEMES["light"]).axes) == (2 if name == "prefixes" else 3)
