"""The subcommands of ``autopack``, one module each, and what several of their options have in common.

Each has `add_arguments`, which describes it and its options, and `run`, which returns the exit status.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from autopack.errors import AutopackError


class CannotWrite(AutopackError):
    """A file that an option names could not be written, or not drawn."""


def positive(text: str) -> int:
    """The type of an option that takes a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, found {number}")
    return number


def check_directory(option: str, path: Path | None) -> None:
    """Raise `CannotWrite` if an option names a file in a directory that is not there."""
    if path is not None and not path.parent.is_dir():
        raise CannotWrite(f"{option} {path}: there is no directory {path.parent}; create it or name another one")


def check_drawable(path: Path | None) -> None:
    """Raise `CannotWrite` if the picture that `--plot` asks for could not be drawn or written."""
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        remedy = "install it with: pip install 'autopack[plot]'"
        raise CannotWrite(f"--plot needs matplotlib, which could not be imported ({error}); {remedy}") from error
    check_directory("--plot", path)
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise CannotWrite(f"--plot {path}: wanted a file name that ends with one of {', '.join(formats)}")
