"""Happy Transformer: its classes for each task with their defaults, which pad a data set to its
longest text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make one of its models and train it on a file."""
    import happytransformer

    kind, name = told["kind"], told["model"]
    model = getattr(happytransformer, kind)(name.upper(), str(folder / name))
    said = {"output_dir": str(output / "out"), "learning_rate": 1e-3, **told.get("told", {})}
    given = getattr(happytransformer, told["arguments"])(**said)
    model.train(str(next(folder.glob(f"{kind}.*"))), args=given)
