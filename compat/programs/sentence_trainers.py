"""sentence-transformers: its trainers of encoders, pairs, sparse vectors and vectors for each token.

The encoder is a tiny BERT without dropout, in one run a tiny Qwen3. Training arguments are the defaults.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import save_encoder, write_logs
from compat.programs._words import text

NAME = "sentence-transformers"
PACKAGE = "sentence-transformers"
STAND_INS = ()
_CACHED = {"mini_batch_size": 4}
_DIMENSIONS = {"matryoshka_dims": [64, 32, 16]}
RUNS: dict[str, dict[str, Any]] = {
    "MultipleNegativesRankingLoss": {"data": "pairs", "loss": "MultipleNegativesRankingLoss"},
    "the same, cached": {"data": "pairs", "loss": "CachedMultipleNegativesRankingLoss", "options": _CACHED},
    "the same, Matryoshka": {"data": "pairs", "loss": "MultipleNegativesRankingLoss", "around": "MatryoshkaLoss"},
    "the same, LoRA": {"data": "pairs", "loss": "MultipleNegativesRankingLoss", "peft": True},
    "the same, two data sets, prompts": {"data": "both", "loss": "MultipleNegativesRankingLoss"},
    "the same, a decoder, last token": {"data": "pairs", "loss": "MultipleNegativesRankingLoss", "model": "qwen3"},
    "CoSENTLoss": {"data": "scores", "loss": "CoSENTLoss"},
    "CosineSimilarityLoss, evaluation": {"data": "scores", "loss": "CosineSimilarityLoss", "eval_strategy": "epoch"},
    "TripletLoss": {"data": "triples", "loss": "TripletLoss"},
    "BatchAllTripletLoss": {"data": "classes", "loss": "BatchAllTripletLoss"},
    "SoftmaxLoss": {"data": "entailment", "loss": "SoftmaxLoss"},
    "cross encoder, BinaryCrossEntropyLoss": {
        "kind": "CrossEncoder",
        "data": "scores",
        "loss": "BinaryCrossEntropyLoss",
    },
    "cross encoder, LambdaLoss": {"kind": "CrossEncoder", "data": "lists", "loss": "LambdaLoss"},
    "SPLADE": {"kind": "SparseEncoder", "data": "pairs", "loss": "SparseMultipleNegativesRankingLoss"},
    "ColBERT": {"kind": "MultiVectorEncoder", "data": "triples", "loss": "MultiVectorMultipleNegativesRankingLoss"},
}
"""The kind of model of each run, its data, its loss, and what it says to the training arguments."""
APART: frozenset[str] = frozenset()
_ROWS = 80


def prepare(folder: Path) -> None:
    """Write a tiny BERT without a head, with that of masked words and with one score, and a decoder."""
    save_encoder(folder / "AutoModel")
    save_encoder(folder / "AutoModelForMaskedLM", "AutoModelForMaskedLM")
    save_encoder(folder / "AutoModelForSequenceClassification", "AutoModelForSequenceClassification", num_labels=1)
    save_encoder(folder / "qwen3", "AutoModel", "qwen3", num_key_value_heads=2, head_dim=16)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.sentence_trainers", run, str(folder), str(output)]


def train(run: str, folder: Path, output: Path) -> None:
    """Train one of the runs, and write what its trainer logged."""
    import sentence_transformers
    import transformers

    told = {"kind": "SentenceTransformer", **RUNS[run]}
    kind, data, loss_name = told.pop("kind"), _data(told.pop("data")), told.pop("loss")
    around, options, adapted = told.pop("around", None), told.pop("options", {}), told.pop("peft", False)
    transformers.set_seed(0)
    model = _model(kind, folder, told.pop("model", "AutoModel"))
    if adapted:
        import peft

        model.add_adapter(peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=8))
    if loss_name == "SoftmaxLoss":
        options = {"sentence_embedding_dimension": 64, "num_labels": 3}
    loss = getattr(_losses(kind), loss_name)(model, **options)
    if around is not None:
        loss = getattr(_losses(kind), around)(model, loss, **_DIMENSIONS)
    if kind == "SparseEncoder":
        loss = _losses(kind).SpladeLoss(
            model, loss=loss, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5
        )
    if isinstance(data, dict):
        told["prompts"] = {"first": {"anchor": "w1 w2 "}, "second": {"anchor": "w3 "}}
    arguments = getattr(sentence_transformers, f"{kind}TrainingArguments")(
        output_dir=str(output),
        per_device_train_batch_size=8,
        max_steps=9,
        logging_steps=1,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        **told,
    )
    trainer = getattr(sentence_transformers, f"{kind}Trainer")(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(16)) if "eval_strategy" in told else None,
        loss=loss,
    )
    trainer.train()
    write_logs(output, trainer.state.log_history)


def _losses(kind: str) -> Any:
    """The module of the losses of a kind of model."""
    homes = {"CrossEncoder": "cross_encoder.", "SparseEncoder": "sparse_encoder."}
    homes["MultiVectorEncoder"] = "multi_vector_encoder."
    return importlib.import_module(f"sentence_transformers.{homes.get(kind, '')}losses")


def _model(kind: str, folder: Path, name: str) -> Any:
    import sentence_transformers

    if kind == "CrossEncoder":
        return sentence_transformers.CrossEncoder(str(folder / "AutoModelForSequenceClassification"), device="cpu")
    if kind == "SparseEncoder":
        return sentence_transformers.SparseEncoder(str(folder / "AutoModelForMaskedLM"), device="cpu")
    if kind == "MultiVectorEncoder":
        return sentence_transformers.MultiVectorEncoder(str(folder / "AutoModel"), device="cpu")
    from sentence_transformers.models import Pooling, Transformer

    tower = Transformer(str(folder / name))
    pooling = Pooling(64, pooling_mode="lasttoken" if name == "qwen3" else "mean")
    return sentence_transformers.SentenceTransformer(modules=[tower, pooling], device="cpu")


def _data(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(0)

    def texts(most: int = 30) -> list[str]:
        return [text(draw, most) for _ in range(_ROWS)]

    pairs = {"anchor": texts(12), "positive": texts()}
    if kind == "both":
        return {name: Dataset.from_dict({"anchor": texts(12), "positive": texts()}) for name in ("first", "second")}
    added: dict[str, dict[str, Any]] = {
        "pairs": {},
        "triples": {"negative": texts()},
        "scores": {"label": [draw.random() for _ in range(_ROWS)]},
        "entailment": {"label": [draw.randrange(3) for _ in range(_ROWS)]},
    }
    if kind in added:
        return Dataset.from_dict({**pairs, **added[kind]})
    if kind == "classes":
        return Dataset.from_dict({"sentence": texts(), "label": [number % 3 for number in range(_ROWS)]})
    counts = [2 + number % 3 for number in range(_ROWS)]
    found = {
        "query": texts(10),
        "docs": [[text(draw, 20) for _ in range(count)] for count in counts],
        "labels": [[1.0, *[0.0] * (count - 1)] for count in counts],
    }
    return Dataset.from_dict(found)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
