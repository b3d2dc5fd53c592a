"""PyLate: ColBERT models by each of its losses, whose queries are filled up with mask tokens that losses read.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "sentence-transformers[train]==5.3.0"
    ENV/bin/pip install "transformers==4.57.6" && ENV/bin/pip install --no-deps "pylate==1.6.0"
    ENV/bin/pip install -e .

Its indexes, which want another torch, are left out. The tiny encoder has no dropout, so that steps can be compared,
and as many embeddings as PyLate's prefixes need: new ones would not be drawn the same in every process.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import SPECIAL, WORDS, text

NAME = "PyLate"
PACKAGE = "pylate"
STAND_INS = ("fast_plaid", "voyager")
RUNS: dict[str, dict[str, Any]] = {
    "contrastive": {},
    "contrastive, queries attend to what fills them up": {"attend_to_expansion_tokens": True},
    "contrastive, queries as they are": {"do_query_expansion": False},
    "contrastive, cached": {},
    "distillation": {},
}
"""What each run says of its model."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoder, whose tokenizer has the prefixes."""
    from transformers import AutoTokenizer

    save_encoder(folder / "bert", vocab_size=len(SPECIAL) + len(WORDS) + 2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    tokenizer.add_tokens(["[unused0]", "[unused1]"])
    tokenizer.save_pretrained(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which trains by sentence-transformers' trainer, as PyLate's documentation does."""
    return driven("pylate_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    from datasets import Dataset
    from pylate import losses, models, utils
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    draw = random.Random(0)
    model = models.ColBERT(str(folder / "bert"), query_length=24, document_length=64, device="cpu", **RUNS[run])
    loss: Any = losses.Contrastive(model=model)
    columns = {"query": 20, "positive": 60, "negative": 60}
    data = Dataset.from_list([{name: text(draw, most) for name, most in columns.items()} for _ in range(16)])
    if run == "contrastive, cached":
        loss = losses.CachedContrastive(model=model, mini_batch_size=2)
    if run == "distillation":
        loss = losses.Distillation(model=model)
        queries = Dataset.from_list([{"query_id": n, "text": text(draw, 20)} for n in range(16)])
        documents = Dataset.from_list([{"document_id": n, "text": text(draw, 60)} for n in range(32)])
        rows = [
            {"query_id": n, "document_ids": draw.sample(range(32), 4), "scores": [draw.random() for _ in range(4)]}
            for n in range(16)
        ]
        data = Dataset.from_list(rows)
        data.set_transform(utils.KDProcessing(queries=queries, documents=documents, n_ways=4).transform)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "out"),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
    )
    SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        loss=loss,
        data_collator=utils.ColBERTCollator(model.tokenize),
    ).train()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
