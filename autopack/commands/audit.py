"""Measure whether documents in a packed row change each other in a model.

Packs a few documents into one row in every way that people call a model, and measures how far each
document is from what it gets alone. The model is one on disk, or a tiny random one of any type.
Exit status 0 if the model is exact, 1 if it leaks.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from autopack.commands import (
    add_model_options,
    add_outputs,
    check_outputs,
    is_saved,
    obtain,
    show,
)
from autopack.errors import AutopackError
from autopack.options import CHOICES, TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory with a saved model, one of the Hub that has been downloaded, or a type "
        "such as qwen3 (built tiny)",
    )
    enabled = parser.add_mutually_exclusive_group()
    enabled.add_argument(
        "--stock",
        action="store_true",
        help="audit the model as transformers runs it, without autopack",
    )
    enabled.add_argument(
        "--backend",
        choices=CHOICES["backend"],
        default="auto",
        help="what autopack computes attention with (%(default)s)",
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        metavar="TASK",
        help="what a type is built for (an encoder: masked-lm, an encoder-decoder: seq2seq, "
        f"others: causal-lm): {', '.join(TASKS)}",
    )
    add_model_options(parser, dtype="float32", device="cpu")
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Audit one model, print the report, and return 0 if it is exact, else 1."""
    check_outputs(args)
    if args.task is not None and is_saved(args.model):
        raise AutopackError(
            f"--task says what a type is built for, and {args.model} is a saved model; leave "
            "it out",
            code="bad-option",
        )
    tasks = TASKS if args.task is None else [args.task]
    model = obtain(args, tasks)

    import autopack

    if not args.stock:
        # The report says what leaks; `verify` would only say that something does.
        autopack.enable(model, backend=args.backend, verify=False)
    report = autopack.audit(model)
    data = asdict(report) | {
        name: getattr(report, name) for name in ("exact", "worst", "packed", "labels", "padded")
    }
    for row, result in zip(data["results"], report.results, strict=True):
        row["exact"] = report.is_exact(result)
    show(args, f"autopack audit: {report.model}", report, data)
    return 0 if report.exact else 1
