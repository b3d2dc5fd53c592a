"""The subcommands of ``autopack``, one module each, and what several of their options have in common.

Each has `add_arguments`, which describes it and its options, and `run`, which returns the exit status.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopack.errors import AutopackError
from autopack.packing.checks import LONGEST
from autopack.pages import parts
from autopack.pages.figure import formats
from autopack.version import __version__


def number(least: int, most: int = sys.maxsize) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number between these."""

    def whole_number(text: str) -> int:
        found = int(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"wanted a number of at least {least}, found {found}")
        if found > most:
            raise argparse.ArgumentTypeError(f"wanted at most {most:,}, found {found}")
        return found

    return whole_number


whole_number, positive = number(0), number(1)
tokens = number(1, LONGEST)
"""The type of an option that takes the tokens of a row."""


def above_0(text: str) -> float:
    """Return what an option takes that is a number above 0."""
    found = float(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"wanted a number above 0, found {text}")
    return found


def _names(text: str) -> list[str]:
    return text.split(",")


def check_directory(option: str, path: Path | None) -> None:
    """Raise `AutopackError` if an option names a file in a directory that is not there, or a directory."""
    if path is None:
        return
    wrong = "wanted a file, found a directory; name a file in it" if path.is_dir() else ""
    if not path.parent.is_dir():
        wrong = f"there is no directory {path.parent}; create it or name another one"
    if wrong:
        raise AutopackError(f"{option} {path}: {wrong}", code="cannot-write")


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """The options of commands that take a data set: --column, --tokenizer, --batch-size."""
    parser.add_argument(
        "--column",
        action="extend",
        type=_names,
        help="the column of lengths, tokens, text or messages (input_ids, length or lengths; with --tokenizer text or "
        "messages); several, as prompt,completion, add up",
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="a tokenizer of transformers, for text and for messages of a chat"
    )
    parser.add_argument("--batch-size", type=positive, default=8, help="documents of a padded batch (%(default)s)")


def add_outputs(parser: argparse._ActionsContainer) -> None:
    """The options --html and --plot, for `check_outputs` and `write_outputs`."""
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write it as a page that needs nothing but itself (figures need matplotlib)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw it (needs matplotlib)")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise `AutopackError` if what --html and --plot ask for could not be written, before anything is computed."""
    check_directory("--html", args.html)
    check_directory("--plot", args.plot)
    if args.plot is not None and args.plot.suffix.lstrip(".").lower() not in (known := formats()):
        raise AutopackError(
            f"--plot {args.plot}: wanted a file name that ends with one of {', '.join(known)}", code="cannot-write"
        )


def write_outputs(args: argparse.Namespace, title: str, body: Callable[[], str], draw: Callable[[], Any]) -> None:
    """Write the page and the picture that --html and --plot ask for, and say so unless JSON is printed.

    The page has a title, the pieces that a notebook shows too, and what was run by what.
    """
    if args.html is not None:
        packages = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
        versions = [f"{name} {version(name)}" for name in packages]
        made = {
            "command": shlex.join(["autopack", *args.argv]),
            "versions": ", ".join([f"autopack {__version__}", *versions, f"Python {platform.python_version()}"]),
            "platform": platform.platform(),
            "date": datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
        }
        # A path may hold bytes that are no text, which print escapes too.
        page = parts.whole(title, made.items(), body())
        args.html.write_text(page, encoding="utf-8", errors="backslashreplace")
        print_path(args, "Page", args.html)
    if args.plot is not None:
        draw().savefig(args.plot)
        print_path(args, "Picture", args.plot)


def print_path(args: argparse.Namespace, name: str, path: Path) -> None:
    """Print where something was written, unless JSON is printed."""
    if args.json is not True:
        print(f"\n{name}: {path}")


def finite(data: Any) -> Any:
    """Return the data with None for what JSON has no number for."""
    return json.loads(json.dumps(data, default=_plain), parse_constant=lambda name: None)


def _plain(value: Any) -> list[Any]:
    """Return an array or a set as a list."""
    return value.tolist() if hasattr(value, "tolist") else sorted(value)


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
