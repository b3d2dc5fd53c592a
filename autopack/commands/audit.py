"""Measure whether documents in a packed row change each other in a model.

Packs a few documents into one row in every way that people call a model, and measures how far each
document is from what it gets alone. The model is one on disk, or a tiny random one of any type.
Exit status 0 if the model is exact, 1 if it leaks.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from autopack.commands import check_outputs, is_saved, obtain, show
from autopack.errors import AutopackError
from autopack.options import TASKS


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
