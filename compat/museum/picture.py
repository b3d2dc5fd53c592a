"""Draw the museum's picture: who changes whom in six mistaken models, as they are and enabled."""

from __future__ import annotations

import importlib.util
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from transformers import set_seed

import autopack
from compat.matrix import ROOT
from compat.museum.exhibit import load

SHOWN = {
    "positions_restart_alone": "positions restart,\nthe mask does not",
    "window_over_the_stream": "a window over\nthe whole stream",
    "images_that_see_each_other": "images see the images\nof other documents",
    "short_convolution": "LFM2: a convolution\nover boundaries",
    "state_of_a_linear_attention": "Qwen3.5: a state\nthat goes on",
    "experts_choose_among_the_row": "experts choose tokens\nby the row's mean",
}
"""Exhibits of models that are exact once they are enabled, with their captions. All are called
without a cache."""


def helpers() -> Any:
    """Return docs/draw.py, which measures and draws influence."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figure(theme: dict[str, str], draw: Any) -> Figure:
    """Return the picture: mistaken models above, and the same ones enabled below."""
    drawn = Figure(figsize=(13, 5.2), layout="constrained", facecolor=theme["paper"])
    above, below = drawn.subplots(2, len(SHOWN))
    for name, caption, stock, enabled in zip(SHOWN, SHOWN.values(), above, below, strict=True):
        set_seed(0)
        model = load(f"models.{name}").mistaken().eval()
        draw.map_of(stock, draw.influence(model, use_cache=False), theme)
        stock.set_title(caption, color=theme["ink"], loc="left", fontsize=11)
        with autopack.enable(model):
            draw.map_of(enabled, draw.influence(model, use_cache=False), theme)
    below[0].set_title("the same, enabled", color=theme["ink"], loc="left", fontsize=11)
    return drawn


def draw() -> None:
    """Write the picture, light and dark."""
    of_docs = helpers()
    for theme, colors in of_docs.THEMES.items():
        with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
            path = of_docs.IMAGES / f"museum-{theme}.png"
            figure(colors, of_docs).savefig(path, dpi=110, metadata={"Software": None})
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    draw()
