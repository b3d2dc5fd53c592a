"""PyLate: ColBERT models by each of its losses, whose queries are filled up with mask tokens that
losses read.

Its indexes, which want another torch, are left out. The tiny encoder has as many embeddings as
PyLate's prefixes need: new ones would not be drawn the same in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import arguments
from compat.programs._words import rows_of


def prepare(folder: Path) -> None:
    """Give the tokenizer the prefixes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    tokenizer.add_tokens(["[unused0]", "[unused1]"])
    tokenizer.save_pretrained(folder / "bert")


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Train by sentence-transformers' trainer, as PyLate's documentation does."""
    from datasets import Dataset
    from pylate import losses, models, utils
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    name, options = told.get("loss", "Contrastive"), told.get("options", {})
    model = models.ColBERT(
        str(folder / "bert"), query_length=24, document_length=64, device="cpu", **options
    )
    loss = getattr(losses, name)(
        model=model, **({"mini_batch_size": 2} if "Cached" in name else {})
    )
    data, queries, documents = (
        Dataset.from_list(rows_of(folder / f"{file}.jsonl"))
        for file in ("scores" if name == "Distillation" else "triples", "queries", "documents")
    )
    if name == "Distillation":
        data.set_transform(
            utils.KDProcessing(queries=queries, documents=documents, n_ways=4).transform
        )
    SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments(output)),
        train_dataset=data,
        loss=loss,
        data_collator=utils.ColBERTCollator(model.tokenize),
    ).train()
