"""Real text without a download: the documentation that every Python installation carries.

Documents are the docstrings of the standard library and the sections of the language reference behind ``help()``.
Their lengths are skewed as in instruction data sets: half of them are a few lines long, a few are pages long.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopack.errors import AutopackError

MINIMUM_CHARACTERS = 60
"""Shorter texts ("Return x.") are left out."""
MINIMUM_DOCUMENTS = 128
"""Fewer are too little to train on; the sections of the reference alone, without any sources, are enough."""

# Not in every installation, or not documentation: a corpus should change as little as possible between machines.
_SKIPPED = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
_SKIPPED |= {"test", "tests", "tkinter", "turtledemo"}
_HEADING = re.compile(r"^(?=[^\n]+\n(?:\*{4,}|={4,}|-{4,}|\^{4,}|~{4,})\n)", re.MULTILINE)


class CorpusTooSmall(AutopackError):
    """This Python installation holds too little documentation to train on."""

    code = "corpus-too-small"


def collect_documents(root: Path | None = None) -> list[str]:
    """Distinct texts of the Python installation, in an order that depends on nothing but their content.

    `root` is the directory of the standard library. That of the running interpreter is read if it is left out, and the
    language reference with it. Raises `CorpusTooSmall` where there are fewer than `MINIMUM_DOCUMENTS` texts.
    """
    topics = _reference_sections() if root is None else ()
    root = root or Path(sysconfig.get_path("stdlib"))
    texts = dict.fromkeys(text for text in (*_docstrings(root), *topics) if len(text) >= MINIMUM_CHARACTERS)
    if len(texts) < MINIMUM_DOCUMENTS:
        raise CorpusTooSmall(
            "the demo trains on the documentation inside the Python installation and wants at least "
            f"{MINIMUM_DOCUMENTS} texts, but found {len(texts)} under {root}: this Python seems to be shipped without "
            "its source files. Run the demo with a Python from python.org, conda, uv or a distribution's full package."
        )
    return list(texts)


def _docstrings(root: Path) -> Iterator[str]:
    """Every docstring below ``root``; the files are parsed and never imported, so nothing in them runs."""
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences in the standard library's own sources
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def _reference_sections() -> Iterator[str]:
    """The sections of the language reference; the module that holds it is plain data."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for _, topic in sorted(topics.items()):
        yield from (section.strip() for section in _HEADING.split(topic))
