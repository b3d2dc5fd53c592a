"""sentence-transformers: its trainers of encoders, pairs, sparse vectors and vectors for each
token.

The encoder is a tiny BERT without dropout, in one run a tiny Qwen3. Training arguments are the
defaults."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import sentence_transformers
import transformers
from datasets import Dataset
from sentence_transformers.models import Pooling, Transformer

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import rows_of

_KINDS = {
    "SentenceTransformer": ("AutoModel", ""),
    "CrossEncoder": ("AutoModelForSequenceClassification", "cross_encoder."),
    "SparseEncoder": ("AutoModelForMaskedLM", "sparse_encoder."),
    "MultiVectorEncoder": ("AutoModel", "multi_vector_encoder."),
}
"""Kinds of models: the tiny model that each is made of, and where its losses are."""


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train a kind of model by a loss, as a run says."""
    told = {"kind": "SentenceTransformer", "options": {}, **told}
    kind, name, options = told.pop("kind"), told.pop("loss"), told.pop("options")
    data = Dataset.from_list(rows_of(folder / f"{told.pop('data')}.jsonl"))
    where, home = _KINDS[kind]
    losses: Any = importlib.import_module(f"sentence_transformers.{home}losses")
    transformers.set_seed(0)
    path = str(folder / told.pop("model", where))
    of_kind = getattr(sentence_transformers, kind)
    if kind == "SentenceTransformer":
        pooling = Pooling(64, pooling_mode="lasttoken" if path.endswith("qwen3") else "mean")
        model = of_kind(modules=[Transformer(path), pooling], device="cpu")
    else:
        model = of_kind(path, device="cpu")
    loss = getattr(losses, name)(model, **options)
    if kind == "SparseEncoder":
        loss = losses.SpladeLoss(
            model, loss=loss, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5
        )
    made = arguments(output, per_device_train_batch_size=8, **told)
    trainer = getattr(sentence_transformers, f"{kind}Trainer")(
        model=model,
        args=getattr(sentence_transformers, f"{kind}TrainingArguments")(**made),
        train_dataset=data,
        eval_dataset=data.select(range(16)) if "eval_strategy" in told else None,
        loss=loss,
    )
    return logged(trainer)
