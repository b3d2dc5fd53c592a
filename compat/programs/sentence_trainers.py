"""sentence-transformers: its trainers of encoders, pairs, sparse vectors and vectors for each
token.

The encoder is a tiny BERT without dropout, in one run a tiny Qwen3. Training arguments are the
defaults."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import text

_ROWS = 80
_KINDS = {
    "SentenceTransformer": ("AutoModel", ""),
    "CrossEncoder": ("AutoModelForSequenceClassification", "cross_encoder."),
    "SparseEncoder": ("AutoModelForMaskedLM", "sparse_encoder."),
    "MultiVectorEncoder": ("AutoModel", "multi_vector_encoder."),
}
"""Kinds of models: the tiny model that each is made of, and where its losses are."""


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train a kind of model by a loss, as a run says."""
    import sentence_transformers
    import transformers

    told = {"kind": "SentenceTransformer", **told}
    kind, data, loss_name = told.pop("kind"), _data(told.pop("data")), told.pop("loss")
    around, options, adapted = (
        told.pop("around", None),
        told.pop("options", {}),
        told.pop("peft", False),
    )
    where, home = _KINDS[kind]
    losses = importlib.import_module(f"sentence_transformers.{home}losses")
    transformers.set_seed(0)
    model = _model(kind, folder / told.pop("model", where))
    if adapted:
        import peft

        model.add_adapter(peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=8))
    loss = getattr(losses, loss_name)(model, **options)
    if around is not None:
        loss = getattr(losses, around)(model, loss, matryoshka_dims=[64, 32, 16])
    if kind == "SparseEncoder":
        loss = losses.SpladeLoss(
            model, loss=loss, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5
        )
    if isinstance(data, dict):
        told["prompts"] = {"first": {"anchor": "w1 w2 "}, "second": {"anchor": "w3 "}}
    made = arguments(output, per_device_train_batch_size=8, max_steps=9, **told)
    trainer = getattr(sentence_transformers, f"{kind}Trainer")(
        model=model,
        args=getattr(sentence_transformers, f"{kind}TrainingArguments")(**made),
        train_dataset=data,
        eval_dataset=data.select(range(16)) if "eval_strategy" in told else None,
        loss=loss,
    )
    return logged(trainer)


def _model(kind: str, where: Path) -> Any:
    import sentence_transformers

    made = getattr(sentence_transformers, kind)
    if kind != "SentenceTransformer":
        return made(str(where), device="cpu")
    from sentence_transformers.models import Pooling, Transformer

    pooling = Pooling(64, pooling_mode="lasttoken" if where.name == "qwen3" else "mean")
    return made(modules=[Transformer(str(where)), pooling], device="cpu")


def _data(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(0)

    def texts(most: int = 30) -> list[str]:
        return [text(draw, most) for _ in range(_ROWS)]

    pairs = {"anchor": texts(12), "positive": texts()}
    if kind == "both":
        return {
            name: Dataset.from_dict({"anchor": texts(12), "positive": texts()})
            for name in ("first", "second")
        }
    added: dict[str, dict[str, Any]] = {
        "pairs": {},
        "triples": {"negative": texts()},
        "scores": {"label": [draw.random() for _ in range(_ROWS)]},
        "entailment": {"label": [draw.randrange(3) for _ in range(_ROWS)]},
    }
    if kind in added:
        return Dataset.from_dict({**pairs, **added[kind]})
    if kind == "classes":
        return Dataset.from_dict(
            {"sentence": texts(), "label": [number % 3 for number in range(_ROWS)]}
        )
    counts = [2 + number % 3 for number in range(_ROWS)]
    found = {
        "query": texts(10),
        "docs": [[text(draw, 20) for _ in range(count)] for count in counts],
        "labels": [[1.0, *[0.0] * (count - 1)] for count in counts],
    }
    return Dataset.from_dict(found)
