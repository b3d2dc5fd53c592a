"""Time a model on your lengths, padded and enabled.

Times padded batches as they are, and both padded batches and packed rows with autopack enabled.
Prints real tokens per second, peak memory, and the ratio to padded. First the losses of all are
compared: exit status 1 if one computes something else than padded. Rounds are interleaved, and a
ratio that noise could have made is too noisy to tell.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, NAMES, draw, lengths_of, longest_document
from autopack.commands import (
    add_data_options,
    add_model_options,
    add_outputs,
    check_outputs,
    is_built,
    keep_freed_memory,
    obtain,
    show,
)
from autopack.errors import AutopackError
from autopack.packing.checks import check_ints

TASKS = ("causal-lm", "masked-lm")
DRAWN, LONGEST = 4096, 2048
"""Number of documents that are drawn (as many are timed as there is time for), and the tokens of
the longest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="llama",
        help="a directory with a saved model, the name of one on the Hub that has been downloaded, "
        "or a type that is built at random: llama, qwen3, mamba, bert ... (%(default)s)",
    )
    model.add_argument(
        "--size",
        choices=NAMES,
        metavar="SIZE",
        help=(
            f"size of what is built: {', '.join(NAMES)}, counted for a Llama (small; on a GPU 130M)"
        ),
    )
    add_model_options(model)

    data = parser.add_argument_group("lengths of documents")
    data.add_argument(
        "--lengths",
        metavar="DATA",
        default="flan",
        help="a .json, .jsonl, .npy or .parquet file of lengths, tokens or text, a folder that "
        f"save_to_disk wrote, or drawn like a data set: {', '.join(DISTRIBUTIONS)} (flan)",
    )
    add_data_options(data)
    data.add_argument(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="cut longer documents (to what the model takes)",
    )

    work = parser.add_argument_group("what is timed")
    work.add_argument(
        "--forward",
        action="store_true",
        help="forward passes without gradients, not training steps",
    )
    work.add_argument(
        "--seconds",
        type=int,
        default=60,
        help="time for all of it, loading apart (%(default)s)",
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Time the arms, print the table, and return 1 if a loss differs from padded's, else 0."""
    check_outputs(args)
    check_ints(batch_size=args.batch_size)
    check_ints(optional=True, max_length=args.max_length)
    keep_freed_memory()
    # torch's profiler, which counts memory, prints lines of its own
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if args.lengths in DISTRIBUTIONS:
        given = draw(DISTRIBUTIONS[args.lengths], DRAWN, LONGEST, seed=0)
        source = f"drawn like {args.lengths}'s"
    else:
        given = lengths_of(Path(args.lengths).expanduser(), args.column, args.tokenizer)
        source = f"{args.lengths}: {len(given):,} documents"

    import torch

    from autopack.bench.compare import compare

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = args.device.startswith("cuda")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    size, name = args.size or ("130M" if on_gpu else "small"), args.model
    if is_built(args.model, TASKS):
        name = f"{args.model}, {size}, random"
    elif args.size:
        raise AutopackError(
            f"--size is for models that are built, and {args.model} is loaded; leave it out",
            code="bad-option",
        )
    most = min(args.max_length or sys.maxsize, int(given.max()))
    model = obtain(args, TASKS, size, most)
    most = min(longest_document(model) or most, most)
    lengths = np.minimum(given, most)
    if cut := int((lengths < given).sum()):
        source += f", {cut:,} cut to {most:,} tokens"
    same = {option: getattr(args, option) for option in ("batch_size", "seconds", "forward")}
    tell = partial(print, file=sys.stderr, flush=True)
    result = compare(model, lengths, name=name, source=source, tell=tell, **same)
    show(args, f"autopack bench: {name}", result, result.as_dict())
    return 1 if result.wrong else 0
