"""sentence-transformers, which calls `model.forward(...)`: encodes, scores and trains as it did with padding."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

import autopack
from autopack.runtime.padding_read import LOOKS
from tests.integration.sentences import folder, sentences

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NEAR = 1e-6
"""Rounding of float32 in vectors of length one."""


def _skipped(handle: Any) -> int:
    """How many places of padding were not computed."""
    assert set(handle.enabled.tally.left) <= {LOOKS}
    return handle.enabled.tally.padding


@pytest.mark.parametrize(
    ("model_type", "task", "pooling"),
    [
        ("bert", "masked-lm", "mean"),
        ("bert", "masked-lm", "cls"),
        ("bert", "masked-lm", "max"),
        ("modernbert", "masked-lm", "mean"),
        ("mpnet", "masked-lm", "mean"),
        ("distilbert", "masked-lm", "mean"),
        ("qwen3", "causal-lm", "lasttoken"),
        ("gemma3_text", "causal-lm", "mean"),
        ("t5", "seq2seq", "mean"),
    ],
)
def test_sentences_get_what_they_got(tmp_path, model_type, task, pooling):
    tower = Transformer(folder(tmp_path, model_type, task, backbone=True))
    encoder = SentenceTransformer(modules=[tower, Pooling(32, pooling_mode=pooling)], device="cpu")
    texts = sentences(24)
    expected = encoder.encode(texts, batch_size=8, convert_to_tensor=True)
    tokens = encoder.encode(texts[:6], output_value="token_embeddings")
    with autopack.enable(encoder) as handle:
        found = encoder.encode(texts, batch_size=8, convert_to_tensor=True)
        near = 2 * NEAR if model_type == "t5" else NEAR  # its states are of any length, not one
        assert (found - expected).abs().max() < near * expected.abs().max()
        for one, other in zip(encoder.encode(texts[:6], output_value="token_embeddings"), tokens, strict=True):
            assert (one - other).abs().max() < 4 * NEAR * other.abs().max()
        assert _skipped(handle) > 0


@pytest.mark.parametrize("labels", [1, 3])
def test_pairs_get_the_scores_that_they_got(tmp_path, labels):
    scorer = CrossEncoder(folder(tmp_path, "bert", "sequence-classification", num_labels=labels), device="cpu")
    pairs = list(zip(sentences(24), sentences(24, seed=1), strict=True))
    expected = scorer.predict(pairs, convert_to_tensor=True, batch_size=8)
    with autopack.enable(scorer) as handle:
        found = scorer.predict(pairs, convert_to_tensor=True, batch_size=8)
        assert (found - expected).abs().max() < NEAR
        assert _skipped(handle) > 0


def test_sparse_vectors_are_those_that_were(tmp_path):
    encoder = SparseEncoder(folder(tmp_path, "bert", "masked-lm"), device="cpu")
    expected = encoder.encode(sentences(16), batch_size=8).to_dense()
    with autopack.enable(encoder) as handle:
        assert (
            encoder.encode(sentences(16), batch_size=8).to_dense() - expected
        ).abs().max() < 4 * NEAR * expected.max()
        assert _skipped(handle) > 0


def _losses(trainer: Any) -> torch.Tensor:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return torch.tensor([entry["loss"] for entry in map(_plain, trainer.state.log_history) if "loss" in entry])


def _plain(entry: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.items() if isinstance(value, int | float | str)}


def _arguments(kind: Any, path: Path) -> Any:
    return kind(
        output_dir=str(path),
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def _bi_encoder(path: Path) -> Any:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tower = Transformer(folder(path / "model", "bert", "masked-lm", backbone=True, **dropouts))
    encoder = SentenceTransformer(modules=[tower, Pooling(32)], device="cpu")
    data = Dataset.from_dict({"anchor": sentences(48), "positive": sentences(48, seed=1)})
    arguments = _arguments(SentenceTransformerTrainingArguments, path)
    loss = MultipleNegativesRankingLoss(encoder)
    return SentenceTransformerTrainer(model=encoder, args=arguments, train_dataset=data, loss=loss)


def _cross_encoder(path: Path) -> Any:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    where = folder(path / "model", "bert", "sequence-classification", num_labels=1, **dropouts)
    scorer = CrossEncoder(where, device="cpu")
    columns = {"a": sentences(48), "b": sentences(48, seed=1), "label": [float(i % 2) for i in range(48)]}
    arguments = _arguments(CrossEncoderTrainingArguments, path)
    data = Dataset.from_dict(columns)
    return CrossEncoderTrainer(model=scorer, args=arguments, train_dataset=data, loss=BinaryCrossEntropyLoss(scorer))


@pytest.mark.parametrize("trainer", [_bi_encoder, _cross_encoder])
def test_trainers_have_their_losses(tmp_path, trainer):
    expected = _losses(trainer(tmp_path / "stock"))
    enabled = trainer(tmp_path / "enabled")
    handle = autopack.enable(enabled)
    found = _losses(enabled)
    assert len(found) == len(expected) == 6
    assert torch.allclose(found, expected, atol=2e-6)
    (of_model,) = handle.handles.values()
    assert _skipped(of_model) > 0
    autopack.disable(enabled)
