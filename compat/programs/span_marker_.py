"""SpanMarker: its trainer with its defaults, which recognises entities by markers of spans beside
the text.

Every row has a mask of its own for each token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import arguments
from compat.programs._words import WORDS

_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make a model of SpanMarker's and train it."""
    from datasets import Dataset
    from span_marker import SpanMarkerModel, Trainer
    from transformers import TrainingArguments

    draw, rows = random.Random(0), []
    for number in range(24):
        words = draw.choices(WORDS, k=draw.randrange(3, 30))
        where = (
            {"document_id": number // 4, "sentence_id": number % 4} if told.get("context") else {}
        )
        rows.append({"tokens": words, "ner_tags": [1, 2, *[0] * (len(words) - 2)], **where})
    lengths = {"model_max_length": 128, "marker_max_length": 64, "entity_max_length": 4}
    model = SpanMarkerModel.from_pretrained(str(folder / told["model"]), labels=_LABELS, **lengths)
    made = TrainingArguments(**arguments(output))
    Trainer(model=model, args=made, train_dataset=Dataset.from_list(rows)).train()
