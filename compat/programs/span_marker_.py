"""SpanMarker: its trainer with its defaults, which recognises entities by markers of spans beside the text.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "span_marker==1.8.1" "transformers==4.57.6"
    ENV/bin/pip install -e .

The tiny encoders have no dropout, so that steps can be compared. Every row has a mask of its own for each token.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import WORDS

NAME = "SpanMarker"
PACKAGE = "span_marker"
STAND_INS = ()
RUNS = {"BERT": "bert", "RoBERTa": "roberta", "BERT, document context": "bert"}
"""The encoder of each run."""
APART: frozenset[str] = frozenset()
_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def prepare(folder: Path) -> None:
    """Write the encoders."""
    save_encoder(folder / "bert", max_position_embeddings=512)
    save_encoder(folder / "roberta", "roberta", max_position_embeddings=514)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes a model of SpanMarker's and trains it."""
    return driven("span_marker_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    from datasets import Dataset
    from span_marker import SpanMarkerModel, Trainer
    from transformers import TrainingArguments

    draw = random.Random(0)
    rows = []
    for number in range(24):
        words = draw.choices(WORDS, k=draw.randrange(3, 30))
        tags = [0] * len(words)
        tags[0], tags[1] = 1, 2
        row = {"tokens": words, "ner_tags": tags}
        rows.append({**row, "document_id": number // 4, "sentence_id": number % 4} if "document" in run else row)
    model = SpanMarkerModel.from_pretrained(
        str(folder / RUNS[run]), labels=_LABELS, model_max_length=128, marker_max_length=64, entity_max_length=4
    )
    arguments = TrainingArguments(
        output_dir=str(output / "out"),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows)).train()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
