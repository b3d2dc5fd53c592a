"""GLiNER: `train_model` with its defaults, on each of its architectures over tiny encoders.

Its own heads and the encoders have no dropout, so that steps can be compared. Each encoder has as
many embeddings as GLiNER's tokens need: new ones would be drawn with a covariance, which is not the
same to the last bit in every process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._words import WORDS


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make a model of a configuration and train it."""
    from gliner import GLiNER, GLiNERConfig

    places: dict[str, Any] = {
        name: str(folder / told[name]) for name in ("model_name", "labels_encoder") if name in told
    }
    settings: dict[str, Any] = {**told, **places, "hidden_size": 64, "dropout": 0.0, "name": "tiny"}
    model = GLiNER.from_config(GLiNERConfig(**settings))
    model.train_model(
        train_dataset=_rows(relations="relations_layer" in told),
        eval_dataset=None,
        output_dir=str(output / "out"),
        max_steps=4,
        learning_rate=1e-3,
        use_cpu=True,
        dataloader_num_workers=0,
        save_strategy="no",
    )


def _rows(relations: bool) -> list[dict[str, Any]]:
    draw, rows = random.Random(0), []
    for _ in range(32):
        words = draw.choices(WORDS, k=draw.randrange(5, 60))
        starts = sorted(draw.sample(range(len(words) - 1), 2))
        spans = [
            [start, start + draw.randrange(2), draw.choice(["person", "place"])] for start in starts
        ]
        found = {"relations": [[0, 1, "lives in"]]} if relations else {}
        rows.append({"tokenized_text": words, "ner": spans, **found})
    return rows
