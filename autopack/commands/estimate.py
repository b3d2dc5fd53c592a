"""Say what packing a data set would gain, counted from its lengths before any training.

Prints the padding of padded batches by batch size, in random order and grouped by length; the
tokens and attention that packed rows save; and the speed-up to expect. Nothing is trained and
nothing is timed.
"""

from __future__ import annotations

import argparse
from typing import get_args

from autopack.bench.predicted import DEVICES
from autopack.commands import add_data_options, add_outputs, check_outputs, show
from autopack.packing.checks import (
    Overflow,
    check_ints,
)

_PASSED_ON = "batch_size overflow column tokenizer groups max_tokens ranks accumulation on".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        help=(
            "a .json, .jsonl, .npy or .parquet file of lengths, tokens or text, or a folder that "
            "save_to_disk wrote"
        ),
    )
    add_data_options(parser)
    parser.add_argument(
        "--max-length", type=int, default=4096, help="tokens of a packed row (%(default)s)"
    )
    parser.add_argument(
        "--overflow",
        choices=get_args(Overflow),
        default="truncate",
        help="what becomes of documents longer than a row (%(default)s)",
    )
    parser.add_argument(
        "--groups",
        nargs="?",
        const=True,
        default=False,
        metavar="COLUMN",
        help=(
            "also plan documents that begin alike together: those of one value in COLUMN, or of "
            "the same first tokens"
        ),
    )
    parser.add_argument(
        "--hidden-size",
        type=int,
        default=4096,
        help="of the model, which says what attention costs beside the rest (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="also say what max_tokens=N gains in the steps of a Trainer",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of those steps (%(default)s)"
    )
    parser.add_argument(
        "--accumulation", type=int, default=1, help="batches of a process in a step (%(default)s)"
    )
    parser.add_argument(
        "--on", choices=list(DEVICES), help="also predict the speed on a GPU, by roofline"
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the estimate of a data set, write it to the files asked for, and return 0."""
    from autopack.bench.estimate import estimate
    from autopack.packing.strategies import CostModel

    check_outputs(args)
    check_ints(hidden_size=args.hidden_size)
    same = {name: getattr(args, name) for name in _PASSED_ON}
    found = estimate(
        args.data, args.max_length, cost=CostModel(1.0, 1 / (12 * args.hidden_size)), **same
    )
    show(args, f"autopack estimate: {args.data}", found, found.as_dict())
    return 0
