"""What people hold, handed to `enable` as it is: pipelines, harnesses, Lightning, SetFit. Scored as ever, unpadded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import AutoTokenizer, pipeline

import autopack
from autopack import tiny
from tests.integration.sentences import folder, sentences
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
NEAR = 1e-6
Door = Callable[[Path], tuple[Any, Callable[[], Any]]]
"""What makes a thing that people hold, and a call of it."""


def numbers(found: Any) -> torch.Tensor:
    """All numbers of a result, in order."""
    if isinstance(found, dict):
        found = [value for value in found.values() if not isinstance(value, str)]
    if isinstance(found, list | tuple):
        return torch.cat([numbers(part) for part in found]) if found else torch.empty(0)
    return torch.as_tensor(found, dtype=torch.float64).reshape(-1)


def piped(path: Path, task: str, auto: Any, model_type: str, kind: str) -> Any:
    where = folder(path, model_type, kind)
    torch.manual_seed(0)  # of a head that the folder lacks
    return pipeline(
        task, model=auto.from_pretrained(where), tokenizer=AutoTokenizer.from_pretrained(where), device="cpu"
    )


def classifying(task: str, model_type: str, kind: str) -> Door:
    """A pipeline that classifies texts or their tokens."""

    def made(path: Path) -> tuple[Any, Callable[[], Any]]:
        heads = {"text": "SequenceClassification", "token": "TokenClassification"}
        auto = getattr(transformers, f"AutoModelFor{heads[task.partition('-')[0]]}")
        pipe = piped(path, task, auto, model_type, kind)
        return pipe, lambda: pipe(sentences(16), batch_size=8)

    return made


def reranker(cache: bool | None = None) -> Door:
    """A cross-encoder of a decoder: by a head with one score, or by the logits of a language model.

    The latter pads on the left, and asks for the last logits alone.
    """

    def made(path: Path) -> tuple[Any, Callable[[], Any]]:
        if cache is None:
            scorer = CrossEncoder(folder(path, "qwen3", "sequence-classification", num_labels=1), device="cpu")
            assert scorer.rank("word1", sentences(8))
        else:
            modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")  # since 6.0
            tower = modules.Transformer(folder(path, "qwen3", "causal-lm"), transformer_task="text-generation")
            scorer = CrossEncoder(modules=[tower, modules.LogitScore(true_token_id=7, false_token_id=9)], device="cpu")
            tower.auto_model.config.use_cache = cache
        pairs = list(zip(sentences(24), sentences(24, seed=1), strict=True))
        return scorer, lambda: scorer.predict(pairs, convert_to_tensor=True, batch_size=8)

    return made


def encoder(path: Path) -> tuple[Any, Callable[[], Any]]:
    """An encoder of a decoder whose cache is on: sentence-transformers 5 leaves it on, 6 turns it off."""
    tower = Transformer(folder(path, "qwen3", "causal-lm", backbone=True))
    found = SentenceTransformer(modules=[tower, Pooling(32, pooling_mode="lasttoken")], device="cpu")
    tower.auto_model.config.use_cache = True
    return found, lambda: found.encode(sentences(16), batch_size=8, convert_to_tensor=True)


DOORS: dict[str, Door] = {
    "texts, bert": classifying("text-classification", "bert", "sequence-classification"),
    "texts, qwen3": classifying("text-classification", "qwen3", "sequence-classification"),
    "tokens, bert": classifying("token-classification", "bert", "masked-lm"),
    "tokens, qwen3": classifying("token-classification", "qwen3", "causal-lm"),
    "reranker by a score": reranker(),
    "reranker by logits": reranker(cache=False),
    "reranker by logits, with a cache": reranker(cache=True),
    "encoder with a cache": encoder,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_results_are_as_ever_without_padding(tmp_path, door):
    subject, call = door(tmp_path)
    expected = call()
    with autopack.enable(subject) as handle:
        scale = numbers(expected).abs().max() if door is encoder else 1.0
        assert (numbers(call()) - numbers(expected)).abs().max() < NEAR * scale
        assert handle.tally.padding > 0
        assert not handle.tally.left
    assert torch.equal(numbers(call()), numbers(expected))


@pytest.mark.parametrize(("model_type", "kind"), [("bert", "masked-lm"), ("llama", "causal-lm")])
def test_features_of_tokens(tmp_path, model_type, kind):
    pipe = piped(tmp_path, "feature-extraction", transformers.AutoModel, model_type, kind)
    texts = sentences(16)
    expected = pipe(texts, batch_size=8, return_tensors=True)
    with autopack.enable(pipe) as handle:
        found = pipe(texts, batch_size=8, return_tensors=True)
        assert handle.tally.padding > 0
        assert not handle.tally.left
    for text, one, other in zip(texts, found, expected, strict=True):
        tokens = len(pipe.tokenizer(text)["input_ids"])
        assert (one[:, :tokens] - other[:, :tokens]).abs().max() < 4 * NEAR * other.abs().max()
        assert not one[:, tokens:].any()


def test_a_model_that_is_called_beside_its_pipeline_keeps_its_cache(tmp_path):
    pipe = piped(tmp_path, "token-classification", transformers.AutoModelForTokenClassification, "qwen3", "causal-lm")
    given = pipe.tokenizer(sentences(4), padding=True, return_tensors="pt")
    given.pop("token_type_ids", None)
    with autopack.enable(pipe) as handle, torch.no_grad():
        pipe(sentences(4), batch_size=4)
        assert pipe.model.base_model(**given).past_key_values is not None
        assert handle.tally.batches == 1
        assert sum(handle.tally.left.values()) == 1


def test_text_is_generated_as_ever(tmp_path):
    pipe = piped(tmp_path, "text-generation", transformers.AutoModelForCausalLM, "llama", "causal-lm")
    pipe.tokenizer.padding_side = "left"
    options = {"batch_size": 4, "max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    expected = pipe(sentences(4), **options)
    with autopack.enable(pipe):
        assert pipe(sentences(4), **options) == expected


def test_a_lightning_module_and_its_trainer():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, model: Any):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def batch(seed: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(9) < torch.tensor([7, 3, 9])[:, None]).long()
        ids = torch.randint(1, 90, (3, 9), generator=torch.Generator().manual_seed(seed)) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def trainer() -> Any:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return lightning.Trainer(max_steps=3, logger=False, accelerator="cpu", **quiet)

    def fit(module: Any, subject: Any) -> None:
        loader = torch.utils.data.DataLoader([batch(seed) for seed in range(3)], batch_size=None)
        subject.fit(module, loader)

    model = tiny.build("llama")
    stock, enabled = Module(copy.deepcopy(model)), Module(model)
    fit(stock, trainer())
    subject = trainer()
    with refused("which-model"):
        autopack.enable(subject)
    with autopack.enable(enabled) as handle:
        fit(enabled, subject)
        assert enabled.losses == pytest.approx(stock.losses, rel=1e-5)
        assert handle.tally.training.calls == handle.tally.batches == 3
        assert autopack.is_enabled(subject)
        assert autopack.enable(subject) is handle
        autopack.disable(subject)
        assert not autopack.is_enabled(enabled)


def test_a_setfit_model_and_its_trainer(tmp_path):
    setfit = pytest.importorskip("setfit")
    from datasets import Dataset
    from sklearn.linear_model import LogisticRegression

    tower = Transformer(folder(tmp_path, "bert", "masked-lm", backbone=True))
    body = SentenceTransformer(modules=[tower, Pooling(32)], device="cpu")
    texts, labels = sentences(24), [number % 2 for number in range(24)]
    model = setfit.SetFitModel(model_body=body, model_head=LogisticRegression().fit(body.encode(texts), labels))
    expected = torch.as_tensor(model.predict_proba(texts, batch_size=8))
    with autopack.enable(model) as handle:
        assert (torch.as_tensor(model.predict_proba(texts, batch_size=8)) - expected).abs().max() < NEAR
        assert handle.tally.padding > 0
    arguments = setfit.TrainingArguments(output_dir=str(tmp_path), batch_size=4, max_steps=2, report_to="none")
    subject = setfit.Trainer(model, arguments, train_dataset=Dataset.from_dict({"text": texts, "label": labels}))
    with autopack.enable(subject) as handle:
        subject.train()
        assert handle.tally.training.calls > 0
        assert handle.tally.training.fill == 1
        assert autopack.is_enabled(model)


class TestHarness:
    """lm-eval's HFLM pads without a mask; where it does is noted by what it pads with."""

    @pytest.fixture
    def harness(self, tmp_path):
        huggingface = pytest.importorskip("lm_eval.models.huggingface")

        def make(model_type: str = "llama", kind: str = "causal-lm", **options: Any) -> Any:
            where = folder(tmp_path, model_type, kind)
            auto = transformers.AutoModelForSeq2SeqLM if kind == "seq2seq" else transformers.AutoModelForCausalLM
            tokenizer = AutoTokenizer.from_pretrained(where)
            tokenizer.eos_token = "[SEP]"
            options = {"batch_size": 8, "device": "cpu", "max_length": 40, **options}
            model = options.pop("model", None) or auto.from_pretrained(where)
            return huggingface.HFLM(pretrained=model, tokenizer=tokenizer, **options)

        return make

    def requests(self, kind: str = "loglikelihood") -> list[Any]:
        from lm_eval.api.instance import Instance

        pairs = zip(sentences(20), sentences(20, seed=1), strict=True)
        if kind == "loglikelihood_rolling":
            return [Instance(kind, {}, (f"{one} {other}",), number) for number, (one, other) in enumerate(pairs)]
        return [Instance(kind, {}, (one, f" {other}"), number) for number, (one, other) in enumerate(pairs)]

    @pytest.mark.parametrize(
        ("model_type", "kind"),
        [("llama", "causal-lm"), ("gpt2", "causal-lm"), ("mamba", "causal-lm"), ("t5", "seq2seq")],
    )
    def test_likelihoods_are_those_that_were(self, harness, model_type, kind):
        model = harness(model_type, kind)
        expected = model.loglikelihood(self.requests(), disable_tqdm=True)
        with autopack.enable(model) as handle:
            found = model.loglikelihood(self.requests(), disable_tqdm=True)
            assert handle.tally.padding > 0
            assert not handle.tally.left
            assert handle.tally.evaluation.fill == 1
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=NEAR)

    def test_a_model_whose_tokens_see_padding_keeps_it(self, harness):
        model = harness(model=tiny.build("bert", task="masked-lm"), backend="causal")
        expected = model.loglikelihood(self.requests(), disable_tqdm=True)
        with autopack.enable(model) as handle:
            assert model.loglikelihood(self.requests(), disable_tqdm=True) == expected
            assert (handle.tally.batches, handle.tally.evaluation.fill) == (0, 1)

    def test_rolling_and_generation(self, harness):
        from lm_eval.api.instance import Instance

        options = {"max_gen_toks": 4, "until": ["nothing"]}
        texts = [Instance("generate_until", {}, (text, options), n) for n, text in enumerate(sentences(6))]
        model, rolling = harness(), self.requests("loglikelihood_rolling")
        expected = model.loglikelihood_rolling(rolling, disable_tqdm=True)
        generated = model.generate_until(texts, disable_tqdm=True)
        with autopack.enable(model) as handle:
            assert model.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, rel=NEAR)
            assert handle.tally.padding > 0
            assert model.generate_until(texts, disable_tqdm=True) == generated

    def test_a_token_of_the_text_that_looks_like_padding_is_none(self, harness):
        """HFLM pads with 0, which is a token like any other in most vocabularies."""
        model = harness()
        expected = model._loglikelihood_tokens([(("", ""), [0, 0, 5], [7, 0, 0, 0]), (("", ""), [5], [0, 0])])
        with autopack.enable(model) as handle:
            found = model._loglikelihood_tokens([(("", ""), [0, 0, 5], [7, 0, 0, 0]), (("", ""), [5], [0, 0])])
            assert (handle.tally.tokens, handle.tally.padding) == (8, 4)
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=NEAR)

    def test_what_it_pads_with_is_given_back(self, harness):
        from lm_eval.models import huggingface

        original, model = huggingface.pad_and_concat, harness()
        before = inspect.getsource(original)
        with autopack.enable(model.model) as handle:
            assert huggingface.pad_and_concat is original
            assert autopack.enable(model) is handle
            assert huggingface.pad_and_concat is not original
            with refused("which-model"):
                autopack.enable([harness(model=tiny.build("llama")), object()])
        assert huggingface.pad_and_concat is original
        assert inspect.getsource(huggingface.pad_and_concat) == before

    def test_a_copy_pads_with_it_too(self, harness):
        model = harness()
        expected = model.loglikelihood(self.requests(), disable_tqdm=True)
        with autopack.enable(model):
            copied = copy.deepcopy(model)
        with autopack.enable(copied) as handle:
            found = copied.loglikelihood(self.requests(), disable_tqdm=True)
            assert handle.tally.padding > 0
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=NEAR)

    def test_a_model_that_is_not_enabled_is_called_as_ever(self, harness):
        enabled, stock = harness(), harness()
        expected = stock.loglikelihood(self.requests(), disable_tqdm=True)
        with autopack.enable(enabled) as handle:
            assert stock.loglikelihood(self.requests(), disable_tqdm=True) == expected
            assert handle.tally.evaluation.calls == 0

    def test_what_is_noted_is_forgotten_where_the_batch_is_written_to(self, harness):
        from lm_eval.models import huggingface

        model = harness()
        with autopack.enable(model) as handle, torch.no_grad():
            batch = huggingface.pad_and_concat(5, [torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6, 7])])
            model._model_call(batch)
            assert handle.tally.padding == 3
            batch[0, 2] = 9
            model._model_call(batch)
            model._model_call(batch.clone())
            assert handle.tally.padding == 3
