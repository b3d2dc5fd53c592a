"""``autopack demo``: train a small Llama twice, offline, and print what packing changes and what it does not."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from autopack.commands import keep_freed_memory, positive
from autopack.demo.table import write_table
from autopack.demo.training import Settings, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small Llama twice from the same seed on the same documents, as padded batches and as packed rows. "
        "Needs no download and no GPU; takes about two minutes on two CPU cores. "
        "Exit status 1 if the losses differ or if documents in a row change each other."
    )
    parser.add_argument("--steps", type=positive, default=Settings.steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of weights and order (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (as many as torch chooses)")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its table, and return 0 if nothing but the time differs between the ways, else 1."""
    keep_freed_memory()
    from tqdm import tqdm

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    tell, progress = partial(print, file=sys.stderr, flush=True), partial(tqdm, unit="step", file=sys.stderr)
    result = compare(Settings(steps=args.steps, seed=args.seed), tell, progress)
    print(write_table(result))
    return 0 if result.succeeded else 1
