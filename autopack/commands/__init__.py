"""The subcommands of ``autopack``, one module each, and what several of their options have in common.

Each has `add_arguments`, which describes it and its options, and `run`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import shlex
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from autopack.errors import AutopackError
from autopack.packing.lengths import LONGEST
from autopack.pages import parts
from autopack.version import __version__


class CannotWrite(AutopackError):
    """A file that an option names could not be written, or not drawn."""


def positive(text: str) -> int:
    """The type of an option that takes a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, found {number}")
    return number


def tokens(text: str) -> int:
    """The type of an option that takes the tokens of a row."""
    number = positive(text)
    if number > LONGEST:
        raise argparse.ArgumentTypeError(f"wanted at most {LONGEST:,}, found {number}")
    return number


def whole_number(text: str) -> int:
    """The type of an option that takes a whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"wanted a number of at least 0, found {number}")
    return number


def check_directory(option: str, path: Path | None) -> None:
    """Raise `CannotWrite` if an option names a file in a directory that is not there, or a directory."""
    if path is not None and not path.parent.is_dir():
        raise CannotWrite(f"{option} {path}: there is no directory {path.parent}; create it or name another one")
    if path is not None and path.is_dir():
        raise CannotWrite(f"{option} {path}: wanted a file, found a directory; name a file in it")


def check_drawable(path: Path | None, option: str = "--plot") -> None:
    """Raise `CannotWrite` if the picture that an option asks for could not be drawn or written."""
    if path is None:
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        remedy = "install it with: pip install 'autopack[plot]'"
        raise CannotWrite(f"{option} needs matplotlib, which could not be imported ({error}); {remedy}") from error
    check_directory(option, path)
    formats = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in formats:
        raise CannotWrite(f"{option} {path}: wanted a file name that ends with one of {', '.join(formats)}")


def add_html(parser: argparse._ActionsContainer) -> None:
    """The option --html, whose page `write_page` writes."""
    about = "also write it as a page that needs nothing but itself (figures need matplotlib)"
    parser.add_argument("--html", type=Path, metavar="FILE", help=about)


def write_page(args: argparse.Namespace, title: str, body: str, about: dict[str, str]) -> None:
    """Write the page that --html asks for: a title, the pieces that a notebook shows too, and what was run by what."""
    packages = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    versions = [f"{name} {version(name)}" for name in packages]
    made = {
        "command": shlex.join(["autopack", *args.argv]),
        **about,
        "versions": ", ".join([f"autopack {__version__}", *versions, f"Python {platform.python_version()}"]),
        "platform": platform.platform(),
        "date": datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
    }
    # A path may hold bytes that are no text, which print escapes too.
    args.html.write_text(parts.whole(title, made.items(), body), encoding="utf-8", errors="backslashreplace")


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory.

    Otherwise it gives the padded batches' large tensors back to the system after every use, and on small virtual
    machines a fifth of the padded arm's time is page faults: packing would look better than it is.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**28)
