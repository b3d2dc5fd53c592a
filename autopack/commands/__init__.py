"""The subcommands of ``autopack``, one module each, and what several of them have in common.

Each has `add_arguments`, which describes it and its options, and `run`, which returns the exit
status.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shlex
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autopack.errors import AutopackError
from autopack.pages import parts
from autopack.pages.figure import formats
from autopack.version import __version__


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of commands that take a data set: --column, --tokenizer, --batch-size."""
    parser.add_argument(
        "--column",
        action="extend",
        type=lambda text: text.split(","),
        help="the column of lengths, tokens, text or messages (input_ids, length or lengths; with "
        "--tokenizer text or messages); several, as prompt,completion, add up",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="a tokenizer of transformers, for text and for messages of a chat",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="documents of a padded batch (%(default)s)"
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options --json, --html and --plot, for `check_outputs` and `show`."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print everything as JSON")
    group.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write it as a page that needs nothing but itself (figures need matplotlib)",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw it (needs matplotlib)"
    )


def check_outputs(args: argparse.Namespace) -> None:
    """Raise `AutopackError` if a file that --html or --plot names cannot be written."""
    for option, path in (("--html", args.html), ("--plot", args.plot)):
        wrong = ""
        if path is None:
            continue
        if not path.parent.is_dir():
            wrong = f"there is no directory {path.parent}; create it or name another one"
        elif path.is_dir():
            wrong = "wanted a file, found a directory; name a file in it"
        elif path is args.plot and path.suffix.lstrip(".").lower() not in (known := formats()):
            wrong = f"wanted a file name that ends with one of {', '.join(known)}"
        if wrong:
            raise AutopackError(f"{option} {path}: {wrong}", code="cannot-write")


def show(args: argparse.Namespace, title: str, found: Any, data: dict[str, Any]) -> None:
    """Print findings as text or JSON, and write the files for --html and --plot.

    The page has a title, the pieces that a notebook shows too, and what was run by what.
    """
    print(json.dumps(_finite(data), indent=1) if args.json else found)
    if args.html is not None:
        versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "numpy")]
        made = {
            "command": shlex.join(["autopack", *args.argv]),
            "versions": ", ".join(
                [f"autopack {__version__}", *versions, f"Python {platform.python_version()}"],
            ),
            "platform": platform.platform(),
            "date": datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
        }
        # A path may hold bytes that are no text, which print escapes too.
        page = parts.whole(title, made.items(), found._repr_html_())
        args.html.write_text(page, encoding="utf-8", errors="backslashreplace")
    if args.plot is not None:
        found.plot().savefig(args.plot)
    for name, path in (("Page", args.html), ("Picture", args.plot)):
        if path is not None and not args.json:
            print(f"\n{name}: {path}")


def _finite(data: Any) -> Any:
    """Return the data as JSON holds it, with None for nan and infinities."""
    return json.loads(json.dumps(data, default=_plain), parse_constant=lambda name: None)


def _plain(value: Any) -> list[Any]:
    """Return an array as a list, and a set as a sorted list."""
    return value.tolist() if hasattr(value, "tolist") else sorted(value)


def keep_freed_memory() -> None:
    """Make glibc keep memory that this process frees; do nothing with another C library.

    Otherwise it gives the padded batches' large tensors back to the system after every use, and on
    small virtual machines a fifth of the padded arm's time is page faults: packing would look
    better than it is.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**28)
