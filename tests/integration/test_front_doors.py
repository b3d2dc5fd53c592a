"""What people hold, handed to `enable` as it is: pipelines, encoders, Lightning. Scored as ever,
unpadded."""

import contextlib
import io

import pytest
import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoder,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import AutoTokenizer, pipeline

import autopack
from autopack import tiny
from autopack.runtime.padding_read import LOOKS
from tests.integration.sentences import folder, sentences
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused
from tests.support.trained import QUIET, losses_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NEAR = 1e-6


def numbers(found):
    """All numbers of a result, in order."""
    if isinstance(found, dict):
        found = [value for value in found.values() if not isinstance(value, str)]
    if isinstance(found, list | tuple):
        return torch.cat([numbers(part) for part in found]) if found else torch.empty(0)
    return torch.as_tensor(found, dtype=torch.float64).reshape(-1)


def piped(path, task, auto, model_type, kind):
    where = folder(path, model_type, kind)
    torch.manual_seed(0)  # of a head that the folder lacks
    return pipeline(
        task,
        model=auto.from_pretrained(where),
        tokenizer=AutoTokenizer.from_pretrained(where),
        device="cpu",
    )


def classifying(task, model_type, kind):
    """A pipeline that classifies texts or their tokens."""

    def made(path):
        heads = {"text": "SequenceClassification", "token": "TokenClassification"}
        auto = getattr(transformers, f"AutoModelFor{heads[task.partition('-')[0]]}")
        pipe = piped(path, task, auto, model_type, kind)
        return pipe, lambda: pipe(sentences(16), batch_size=8)

    return made


def scorer(labels):
    """A cross-encoder by a head with so many scores."""

    def made(path):
        kind = "qwen3" if labels == 1 else "bert"
        found = CrossEncoder(
            folder(path, kind, "sequence-classification", num_labels=labels), device="cpu"
        )
        if labels == 1:
            assert found.rank("word1", sentences(8))
        return found, lambda: found.predict(PAIRS, convert_to_tensor=True, batch_size=8)

    return made


def reranker(cache):
    """A cross-encoder by the logits of a language model, which pads on the left, and asks for the
    last ones alone."""

    def made(path):
        modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")  # since 6.0
        tower = modules.Transformer(
            folder(path, "qwen3", "causal-lm"), transformer_task="text-generation"
        )
        found = CrossEncoder(
            modules=[tower, modules.LogitScore(true_token_id=7, false_token_id=9)], device="cpu"
        )
        tower.auto_model.config.use_cache = cache
        return found, lambda: found.predict(PAIRS, convert_to_tensor=True, batch_size=8)

    return made


def sparse(path):
    found = SparseEncoder(folder(path, "bert", "masked-lm"), device="cpu")
    return found, lambda: found.encode(sentences(16), batch_size=8).to_dense()


def encoder(model_type, task, pooling, cache=False):
    """An encoder, and what it makes of sentences and of their tokens.

    sentence-transformers 5 leaves the cache of a decoder on, 6 turns it off.
    """

    def made(path):
        tower = Transformer(folder(path, model_type, task, backbone=True))
        found = SentenceTransformer(
            modules=[tower, Pooling(32, pooling_mode=pooling)], device="cpu"
        )
        if cache:
            tower.auto_model.config.use_cache = True
        texts = sentences(24)

        def call():
            tokens = found.encode(texts[:6], output_value="token_embeddings")
            return [*tokens, found.encode(texts, batch_size=8, convert_to_tensor=True)]

        return found, call

    return made


PAIRS = list(zip(sentences(24), sentences(24, seed=1), strict=True))
ENCODERS = [
    ("bert", "masked-lm", "mean"),
    ("modernbert", "masked-lm", "mean"),
    ("qwen3", "causal-lm", "lasttoken"),
    ("gemma3_text", "causal-lm", "mean"),
    ("t5", "seq2seq", "mean"),
    ("qwen3", "causal-lm", "lasttoken", True),
]
DOORS = {
    "texts, bert": classifying("text-classification", "bert", "sequence-classification"),
    "texts, qwen3": classifying("text-classification", "qwen3", "sequence-classification"),
    "tokens, bert": classifying("token-classification", "bert", "masked-lm"),
    "tokens, qwen3": classifying("token-classification", "qwen3", "causal-lm"),
    "a score": scorer(1),
    "scores": scorer(3),
    "reranker by logits": reranker(cache=False),
    "reranker by logits, with a cache": reranker(cache=True),
    "sparse vectors": sparse,
    **{f"encoder, {', '.join(map(str, case))}": encoder(*case) for case in ENCODERS},
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_results_are_as_ever_without_padding(tmp_path, door):
    subject, call = door(tmp_path)
    expected = numbers(call())
    with autopack.enable(subject) as handle:
        assert (numbers(call()) - expected).abs().max() < 4 * NEAR * max(1.0, expected.abs().max())
        assert handle.tally.padding > 0
        assert not handle.tally.left
    assert torch.equal(numbers(call()), expected)


def test_a_model_that_is_called_beside_its_pipeline_keeps_its_cache(tmp_path):
    pipe = piped(
        tmp_path,
        "token-classification",
        transformers.AutoModelForTokenClassification,
        "qwen3",
        "causal-lm",
    )
    given = pipe.tokenizer(sentences(4), padding=True, return_tensors="pt")
    given.pop("token_type_ids", None)
    with autopack.enable(pipe) as handle, torch.no_grad():
        pipe(sentences(4), batch_size=4)
        assert pipe.model.base_model(**given).past_key_values is not None
        assert handle.tally.batches == 1
        assert sum(handle.tally.left.values()) == 1


def test_a_lightning_module_and_its_trainer():
    """That what it trains is exact is measured in test_neighbours.py."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny.build("llama")

        def training_step(self, batch, number):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    module, subject = (
        Module(),
        lightning.Trainer(max_steps=3, logger=False, accelerator="cpu", **quiet),
    )
    with refused("which-model"):
        autopack.enable(subject)
    rows = [batch("causal LM", mask_of((7, 3, 9)), seed) for seed in range(3)]
    with autopack.enable(module) as handle:
        subject.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
        assert handle.tally.training.calls == handle.tally.batches == 3
        assert autopack.is_enabled(subject)
        assert autopack.enable(subject).enabled is handle.enabled
        autopack.disable(subject)
        assert not autopack.is_enabled(module)


def _losses(trainer):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return torch.tensor(losses_of(trainer), dtype=torch.float32)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _trainer(path):
    tower = Transformer(folder(path / "model", "bert", "masked-lm", backbone=True, **NO_DROPOUT))
    model = SentenceTransformer(modules=[tower, Pooling(32)], device="cpu")
    settings = {
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    }
    args = SentenceTransformerTrainingArguments(
        output_dir=str(path), max_steps=6, **settings, **QUIET
    )
    data = Dataset.from_dict({"anchor": sentences(48), "positive": sentences(48, seed=1)})
    loss = MultipleNegativesRankingLoss(model)
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss)


def test_trainers_have_their_losses(tmp_path):
    expected = _losses(_trainer(tmp_path / "stock"))
    enabled = _trainer(tmp_path / "enabled")
    with autopack.enable(enabled) as handle:
        found = _losses(enabled)
    assert len(found) == len(expected) == 6
    assert torch.allclose(found, expected, atol=2e-6)
    (of_model,) = handle.models.values()
    assert of_model.tally.padding > 0
    assert set(of_model.tally.left) <= {LOOKS}
