"""``autopack estimate``: what packing would gain on a data set, counted from lengths, before any training."""

from __future__ import annotations

import argparse
import json
from typing import get_args

from autopack.commands import (
    add_data_options,
    add_outputs,
    check_outputs,
    positive,
    tokens,
    whole_number,
    write_outputs,
)
from autopack.packing.lengths import Overflow
from autopack.packing.plans import Strategy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what packing a data set would gain: padding of padded batches by batch size, in random order and grouped "
        "by length; tokens and attention that packed rows save; and the speed-up to expect. Only lengths are counted: "
        "nothing is trained and nothing is timed."
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a .json, .jsonl, .npy or .parquet file of lengths, tokens or text, or a folder that save_to_disk wrote",
    )
    add_data_options(parser)
    parser.add_argument("--max-length", type=tokens, default=4096, help="tokens of a packed row (%(default)s)")
    parser.add_argument(
        "--overflow",
        choices=get_args(Overflow),
        default="truncate",
        help="what becomes of documents longer than a row (%(default)s)",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        choices=get_args(Strategy),
        help="only these ways of filling rows; may be given several times (all)",
    )
    parser.add_argument(
        "--groups",
        nargs="?",
        const=True,
        default=False,
        metavar="COLUMN",
        help="also plan documents that begin alike together: those of one value in COLUMN, or of the same first tokens",
    )
    parser.add_argument(
        "--hidden-size",
        type=positive,
        default=4096,
        help="of the model, which says what attention costs beside the rest (%(default)s)",
    )
    parser.add_argument("--ranks", type=positive, default=1, help="processes to plan for (%(default)s)")
    parser.add_argument("--seed", type=whole_number, default=0, help="of the random orders (%(default)s)")
    add_outputs(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; 0."""
    from autopack.bench.estimate import estimate
    from autopack.packing.balance import CostModel

    check_outputs(args)
    same = {name: getattr(args, name) for name in "batch_size overflow ranks column tokenizer groups seed".split()}
    cost = CostModel(1.0, 1 / (12 * args.hidden_size))
    found = estimate(args.data, args.max_length, strategies=args.strategy or get_args(Strategy), cost=cost, **same)
    print(json.dumps(found.as_dict(), indent=1) if args.json else found)
    write_outputs(args, f"autopack estimate: {args.data}", found._repr_html_, found.plot)
    return 0
