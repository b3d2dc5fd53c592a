"""``autopack bench``: time a model of yours on lengths of yours, padded and packed, stock and enabled."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopack.bench.sources import lengths_of
from autopack.bench.subjects import DISTRIBUTIONS, NAMES, Lengths, draw, longest_document
from autopack.commands import (
    above_0,
    add_data_options,
    add_outputs,
    check_directory,
    check_outputs,
    finite,
    keep_freed_memory,
    positive,
    tokens,
    whole_number,
    write_outputs,
)
from autopack.commands.models import add_model_options, is_saved, obtain, task_for, types_for
from autopack.errors import AutopackError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TASKS = ("causal-lm", "masked-lm")
DRAWN = 4096
"""Documents that are drawn, of which as many are timed as there is time for."""
LONGEST = 2048
"""Tokens of the longest document that is drawn, unless `--max-length` says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time a model on documents of your lengths: padded batches, padded and grouped by length, stock packed rows, "
        "and both padded batches and packed rows with autopack enabled. Prints real tokens per second, peak memory, "
        "and the ratio to padded. First the losses of all are compared: exit status 1 if an arm computes something "
        "else than padded. Rounds are interleaved, and a ratio that noise could have made is too noisy to tell."
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="llama",
        help="a directory with a saved model, the name of one on the Hub that has been downloaded, or a type that is "
        "built at random: llama, qwen3, mamba, bert ... (%(default)s)",
    )
    model.add_argument(
        "--size",
        choices=NAMES,
        metavar="SIZE",
        help=f"size of what is built: {', '.join(NAMES)}, counted for a Llama (small; on a GPU 130M)",
    )
    add_model_options(model, "of enabled arms")

    data = parser.add_argument_group("lengths of documents")
    data.add_argument(
        "--lengths",
        metavar="DATA",
        default="flan",
        help="a .json, .jsonl, .npy or .parquet file of lengths, tokens or text, a folder that save_to_disk wrote, or "
        f"drawn like a data set: {', '.join(DISTRIBUTIONS)} (flan)",
    )
    add_data_options(data)
    data.add_argument("--mean", type=above_0, help="tokens of a drawn document (flan: 471)")
    data.add_argument("--sigma", type=above_0, help="of the logarithm of drawn lengths (flan: 1)")
    data.add_argument(
        "--max-length",
        type=tokens,
        metavar="TOKENS",
        help=f"cut longer documents (none; drawn ones have {LONGEST} tokens at most, or what the model takes)",
    )
    data.add_argument(
        "--prompt",
        type=tokens,
        default=0,
        metavar="TOKENS",
        help="put a prompt of so many tokens before each document, the same one in a batch (none)",
    )

    work = parser.add_argument_group("what is timed, and what comes of it")
    work.add_argument("--forward", action="store_true", help="forward passes without gradients, not training steps")
    work.add_argument("--seconds", type=above_0, default=60, help="time for all of it, loading apart (%(default)s)")
    work.add_argument("--rounds", type=positive, help="just so many rounds, however long they take")
    work.add_argument("--batches", type=positive, help="batches of a round (as many as fit)")
    work.add_argument("--seed", type=whole_number, default=0, help="of weights, tokens and lengths (%(default)s)")
    work.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured as JSON")
    add_outputs(work)


def run(args: argparse.Namespace) -> int:
    """Time the arms, print the table, and return 0 if all that should compute the same do, else 1."""
    check_directory("--json", args.json)
    check_outputs(args)
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts memory, prints lines of its own
    from tqdm import tqdm

    from autopack.bench.compare import RaceSettings, compare
    from autopack.bench.report import report_of

    lengths, source = _lengths(args)
    model, about = _model(args, int(lengths.max()) + args.prompt)
    about["lengths"] = source
    if args.max_length is None and args.lengths in DISTRIBUTIONS:
        lengths = np.minimum(lengths, longest_document(model) or LONGEST)
    if args.prompt:
        lengths = lengths + args.prompt
        about["lengths"] += f"; those of a batch begin with the same {args.prompt:,} tokens, put before them"
    same = {name: getattr(args, name) for name in "batch_size batches rounds seconds forward seed prompt".split()}
    settings = RaceSettings(**same, backend=args.backend or "auto")
    with tqdm(total=args.rounds, desc="timing", unit="round", file=sys.stderr, leave=False, disable=None) as bar:
        tell = partial(bar.write, file=sys.stderr)
        result = compare(model, lengths, settings, tell, lambda number: bar.update())
    result.model |= about
    report = report_of(result)
    print(report.text(max(80, min(shutil.get_terminal_size().columns, 120))))
    if args.json is not None:
        args.json.write_text(json.dumps(finite(result.as_dict()), indent=1) + "\n", encoding="utf-8")
    title = f"autopack bench: {result.model['name']}"
    write_outputs(args, title, report.html, report.picture)
    return 1 if result.wrong else 0


def _model(args: argparse.Namespace, longest: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model that the options ask for, and what is said of it; one that is built takes `longest` tokens."""
    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cuda = args.device.startswith("cuda")
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    size, task = args.size or ("130M" if cuda else "small"), task_for(args.model, TASKS)
    built = args.model in types_for(TASKS) and not is_saved(args.model)
    if args.size and not built:
        raise AutopackError(
            f"--size is for models that are built, and {args.model} is loaded; leave it out", code="bad-option"
        )
    model = obtain(args, TASKS, task, size, longest, args.seed)
    return model, {"name": f"{args.model}, {size}, random" if built else args.model}


def _lengths(args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Return tokens of every document, drawn or read as `autopack estimate` reads them, and what is said of them."""
    if args.lengths in DISTRIBUTIONS:
        known = DISTRIBUTIONS[args.lengths]
        lengths = Lengths(args.mean or known.mean, args.sigma or known.sigma)
        said = f"drawn, mean {lengths.mean:g}, sigma {lengths.sigma:g}"
        return draw(lengths, DRAWN, args.max_length or LONGEST, args.seed), said
    if args.mean or args.sigma:
        raise AutopackError(
            f"--mean and --sigma are for drawn lengths, and --lengths {args.lengths} is read; leave either out",
            code="bad-option",
        )
    found = lengths_of(Path(args.lengths).expanduser(), args.column, args.tokenizer)
    cut = np.minimum(found, args.max_length or found.max())
    over = f", {(cut < found).sum():,} cut to {args.max_length:,} tokens" if (cut < found).any() else ""
    return cut, f"{args.lengths}: {len(found):,} documents{over}"
