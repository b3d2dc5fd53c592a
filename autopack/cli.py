"""The command ``autopack``: finds the subcommand, and turns errors into exit statuses.

A subcommand is a module whose docstring is its help, of which ``autopack --help`` shows the first
line, with ``add_arguments(parser)`` and ``run(args) -> int``; importing it imports neither torch
nor transformers. Exit status 0 is success, 1 a check that failed, 2 a request
that could not be carried out; 130 means Ctrl-C, and 141 a closed pipe.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from autopack.errors import AutopackError
from autopack.version import __version__, refuse_old

COMMANDS = {
    "demo": "autopack.demo",
    "doctor": "autopack.commands.doctor",
    "families": "autopack.commands.families",
    "estimate": "autopack.commands.estimate",
    "bench": "autopack.commands.bench",
    "audit": "autopack.commands.audit",
    "run": "autopack.commands.run",
}
"""Name and module of each subcommand."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, print errors in one line, and return the exit status.

    `argv` defaults to the arguments of the process.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                # an error of what is written belongs here, and not to the end of the process
                sys.stdout.flush()
    except OSError as error:
        # what is left is written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"autopack: could not write its output: {error.strerror}", file=sys.stderr)
        return 2


def _run(arguments: list[str]) -> int:
    """Run the subcommand that the arguments name, print errors, and return the exit status."""
    whole = parser()
    args = whole.parse_args(arguments)
    if args.command is None:
        whole.print_help()
        return 0
    args.argv = arguments
    try:
        if args.command != "doctor":  # which says all that is wrong
            refuse_old()
        return args.run(args)
    except BrokenPipeError:
        raise
    except (AutopackError, OSError, ValueError, ImportError, MemoryError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        print(f"autopack {args.command}: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autopack {args.command}: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line with all subcommands."""
    whole = argparse.ArgumentParser(
        prog="autopack",
        description=(
            "Exact packing for Hugging Face models: see what it gains, and try if it works here."
        ),
    )
    whole.add_argument("--version", action="version", version=f"autopack {__version__}")
    subparsers = whole.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = import_module(module)
        about = command.__doc__ or ""
        subparser = subparsers.add_parser(name, help=about.partition("\n")[0], description=about)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return whole
