"""Figures of matplotlib as SVG inside a page: in its colours and its width, with texts that are texts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, LINE, PAPER = "#22303c", "#5b6773", "#dde2e7", "#ffffff"
PADDED, GROUPED, PACKED, STOCK, LEAKS, LIMIT = "#b8bec7", "#8fc1cf", "#1f6f8b", "#d3c4a3", "#d9822b", "#b42318"
_THEMED = {INK: "ink", FAINT: "faint", LINE: "line", PAPER: "paper", PADDED: "padded", GROUPED: "grouped",
           PACKED: "packed", STOCK: "stock", LEAKS: "leaks", LIMIT: "limit"}  # fmt: skip
"""Colours that a page may have others for, by the names of its variables. Without a page they are those of the figure,
but for what has to be seen on light and on dark, as notebooks may be either."""
_NO_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML has no place for, and fonts no glyph: terminals' codes in messages, bytes of a path that are no text."""
_WITHOUT_PAGE = {INK: "currentColor", FAINT: "currentColor", LINE: "rgba(128,140,152,0.3)"}
NO_FIGURES = "Figures are left out, since matplotlib is not installed (pip install 'autopack[plot]')."


@contextmanager
def style(**more: Any) -> Iterator[None]:
    """Settings of figures, for what is drawn in the block; texts are never taken for formulas."""
    import matplotlib

    colored = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(colored, INK)
    settings |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}
    settings |= {"legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "autopack", "hatch.linewidth": 1.2}
    with matplotlib.rc_context(settings | more):
        yield


@contextmanager
def poster(size: tuple[float, float], title: str, below: str) -> Iterator[Figure]:
    """A picture of its own, of so many inches, for what is drawn in the block: a title, and what is said below."""
    from matplotlib.figure import Figure

    with style(**{"font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left"}):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=18, x=0.01, ha="left")
        figure.supxlabel(below, fontsize=11, x=0.01, ha="left", color=FAINT)
        yield figure
        readable(figure)


def drawn(draw: Callable[[Any], Any], size: tuple[float, float]) -> str | None:
    """What a function draws on axes of so many inches, as SVG; None where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    with style():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        return inline(figure)


def inline(figure: Figure) -> str:
    """A figure as SVG inside HTML, as wide as there is room; nothing in it names anything outside."""
    from xml.etree import ElementTree  # here alone, as a script under `autopack run` may have an xml.py of its own

    readable(figure)
    buffer = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    # Several figures share a page, and those of several cells a notebook: what they name must not be each other's.
    prefix = "ap" + hashlib.sha256(buffer.getvalue().encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in [each for each in parent if each.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        given = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if element.tag == "g":
            given.pop("id", None)
        element.attrib = {name: _own(name, value, prefix) for name, value in given.items()}
    width = float(root.attrib["viewBox"].split()[2])
    for name in ("width", "height", "version"):
        del root.attrib[name]
    shown = f"width:100%;max-width:{1.6 * width:.0f}px;height:auto;stroke-linejoin:round;stroke-linecap:butt"
    root.attrib |= {"role": "img", "style": shown}
    return ElementTree.tostring(root, encoding="unicode")


def readable(figure: Figure) -> Figure:
    """The same figure, with a mark in its texts for every character that cannot be drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(_NO_CHARACTERS.sub("\ufffd", text.get_text()))
    return figure


def _own(name: str, value: str, prefix: str) -> str:
    """An attribute with the names of this figure, the colours of the page and its font."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return value.replace("#", f"#{prefix}-")
    return _themed(re.sub(r"font-family:[^;]*;\s*", "", value.replace("url(#", f"url(#{prefix}-")))


def _themed(value: str) -> str:
    def variable(found: re.Match[str]) -> str:
        color = found[0].lower()
        name = _THEMED.get(color)
        return color if name is None else f"var(--ap-{name}, {_WITHOUT_PAGE.get(color, color)})"

    return re.sub(r"(?<![\w(#])#[0-9a-fA-F]{6}\b", variable, value)
