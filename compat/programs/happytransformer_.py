"""Happy Transformer: its classes for each task with their defaults, which pad a data set to its
longest text."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compat.programs._words import WORDS, text


def prepare(folder: Path) -> None:
    """Write a file of texts for each task."""
    draw = random.Random(0)

    def write(name: str, columns: list[str], rows: Iterable[list[Any]]) -> None:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    write(
        "HappyTextClassification.csv",
        ["text", "label"],
        ([text(draw, 60), n % 2] for n in range(32)),
    )
    contexts = [text(draw, 60) for _ in range(32)]
    asked = (
        [one, f"{WORDS[1]} {WORDS[2]}", one.split()[1], one.index(one.split()[1])]
        for one in contexts
    )
    write(
        "HappyQuestionAnswering.csv", ["context", "question", "answer_text", "answer_start"], asked
    )
    write(
        "HappyTextToText.csv",
        ["input", "target"],
        ([text(draw, 60), text(draw, 20)] for _ in range(32)),
    )
    lines = "\n".join(text(draw, 60) for _ in range(32)) + "\n"
    for name in ("HappyWordPrediction.txt", "HappyGeneration.txt"):
        (folder / name).write_text(lines)


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make one of its models and train it on a file."""
    import happytransformer

    kind, name = told["kind"], told["model"]
    model = getattr(happytransformer, kind)(name.upper(), str(folder / name))
    said = {"output_dir": str(output / "out"), "learning_rate": 1e-3, **told.get("told", {})}
    given = getattr(happytransformer, told["arguments"])(**said)
    model.train(str(next(folder.glob(f"{kind}.*"))), args=given)
