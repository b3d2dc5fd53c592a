"""The command ``autopack``: finds the subcommand, imports only that one, and turns errors into exit statuses.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``; importing it imports neither torch nor
transformers. Exit status 0 is success, 1 a check that failed, 2 a request that could not be carried out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from autopack.errors import AutopackError
from autopack.version import __version__, refuse_old

COMMANDS = {
    "demo": ("autopack.commands.demo", "train a small model offline: padded batches against packed rows"),
    "doctor": ("autopack.commands.doctor", "say what is installed, what autopack would use, and what is broken"),
    "families": ("autopack.commands.families", "list the architectures that are served, how, and what was measured"),
    "estimate": ("autopack.commands.estimate", "say what packing a data set would gain, counted from its lengths"),
    "bench": ("autopack.commands.bench", "time a model on your lengths, padded and packed, stock and enabled"),
    "audit": ("autopack.commands.audit", "measure whether documents in a packed row change each other in a model"),
    "run": ("autopack.commands.run", "run a script as it is, with every model enabled that it trains"),
}
"""Name of each subcommand, its module, and its line in ``autopack --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; `argv` is that of the process if left out. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    args = parser([] if called is None else [called]).parse_args(arguments)
    args.argv = arguments
    try:
        if args.command != "doctor":  # which says all that is wrong
            refuse_old()
        return import_module(COMMANDS[args.command][0]).run(args)
    except AutopackError as error:
        print(f"autopack {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autopack {args.command}: interrupted", file=sys.stderr)
        return 130


def parser(known: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser with all subcommands; those that are `known` have their options, and only they are imported."""
    whole = argparse.ArgumentParser(
        prog="autopack",
        description="Exact packing for Hugging Face models: what it gains here, whether it works here, and on what.",
    )
    whole.add_argument("--version", action="version", version=f"autopack {__version__}")
    subparsers = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in known:
            import_module(module).add_arguments(subparser)
    return whole
