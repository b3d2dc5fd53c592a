"""sentence-transformers: its trainers of encoders, pairs, sparse vectors and vectors for each
token.

The encoder is a tiny BERT without dropout, in one run a tiny Qwen3. Training arguments are the
defaults."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

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
    import sentence_transformers
    import transformers
    from datasets import Dataset

    told = {"kind": "SentenceTransformer", **told}
    kind, names, loss_name = told.pop("kind"), told.pop("data"), told.pop("loss")
    sets = [Dataset.from_list(rows_of(folder / f"{name}.jsonl")) for name in names.split(", ")]
    data: Any = sets[0]
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
    if len(sets) == 2:
        data = dict(zip(("first", "second"), sets, strict=True))
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
