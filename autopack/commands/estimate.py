"""Say what packing a data set would gain, counted from its lengths before any training.

Prints the padding of padded batches by batch size, in random order and grouped by length; the
tokens and attention that packed rows save; and the speed-up to expect. Nothing is trained and
nothing is timed.
"""

from __future__ import annotations

import argparse

from autopack.commands import check_outputs, show
from autopack.packing.checks import check_ints

_PASSED_ON = "batch_size overflow column tokenizer groups max_tokens ranks accumulation on".split()


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
