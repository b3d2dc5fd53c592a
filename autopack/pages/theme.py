"""Colours of figures, and their SVG as a piece of a page, in the colours that the page has for them."""

from __future__ import annotations

import hashlib
import re

INK, FAINT, LINE, PAPER = "#22303c", "#5b6773", "#dde2e7", "#ffffff"
PADDED, GROUPED, PACKED, STOCK, LEAKS, LIMIT = "#b8bec7", "#8fc1cf", "#1f6f8b", "#d3c4a3", "#d9822b", "#b42318"
_THEMED = {INK: "ink", FAINT: "faint", LINE: "line", PAPER: "paper", PADDED: "padded", GROUPED: "grouped",
           PACKED: "packed", STOCK: "stock", LEAKS: "leaks", LIMIT: "limit"}  # fmt: skip
"""Colours that a page may have others for, by the names of its variables. Without a page they are those of the figure,
but for what has to be seen on light and on dark, as notebooks may be either."""
_WITHOUT_PAGE = {INK: "currentColor", FAINT: "currentColor", LINE: "rgba(128,140,152,0.3)"}


def inline(drawing: str) -> str:
    """Return SVG of matplotlib as a piece of HTML, as wide as there is room; nothing in it names anything outside."""
    from xml.etree import ElementTree  # here alone, as a script under `autopack run` may have an xml.py of its own

    root = ElementTree.fromstring(drawing)
    # Several figures share a page, and those of several cells a notebook: what they name must not be each other's.
    prefix = "ap" + hashlib.sha256(drawing.encode()).hexdigest()[:8]
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
