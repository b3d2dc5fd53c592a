"""Unmodified Trainer and TRL scripts on real text: the same losses, metrics and checkpoints, without the padding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopack
from autopack.demo import END_OF_TEXT, collect_documents, train_tokenizer
from autopack.tiny.models import randomize

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 30
DIGITS = 1e-4
"""Losses agree to four digits."""
VOCABULARY = 384


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Short paragraphs of Python's documentation, of uneven length."""
    documents = [document for document in collect_documents() if 20 < len(document) < 160]
    assert len(documents) > 400
    return documents[:: len(documents) // 400][:400]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(texts, VOCABULARY),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=512,
    )


def build(tokenizer: Any, head: str = "AutoModelForCausalLM", **config: Any) -> Any:
    """A tiny Llama; two calls give the same parameters."""
    small = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **config,
    )
    model = getattr(transformers, head).from_config(small, attn_implementation="sdpa")
    randomize(model, 0)
    return model


def arguments(directory: Path, **settings: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-3,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 0,
        **settings,
    }


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(make: Any, names: tuple[str, ...] = ("model",), steps: int = STEPS) -> tuple[Any, Any, Any]:
    """Train stock and enabled; the logged losses agree. Returns both trainers and the handle."""
    stock, enabled = make(), make()
    handle = autopack.enable(enabled)
    assert tuple(handle.handles) == names, handle
    wanted, found = losses(stock), losses(enabled)
    assert len(found) == len(wanted) == steps
    assert found == pytest.approx(wanted, rel=DIGITS, abs=1e-8)
    assert len(set(wanted)) > steps / 2, "the losses must move"
    return stock, enabled, handle


def avoided(handle: Any, name: str = "model") -> int:
    return handle.handles[name].tally.padding


class TestTrainer:
    def _make(self, texts, tokenizer, tmp_path, build_model=None, collator=None, **settings):
        examples = [{"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts]
        extra = {k: settings.pop(k) for k in ("compute_metrics", "compute_loss_func") if k in settings}

        def make():
            return transformers.Trainer(
                model=(build_model or build)(tokenizer),
                args=transformers.TrainingArguments(**arguments(tmp_path, **settings)),
                train_dataset=examples[:300],
                eval_dataset=examples[300:],
                data_collator=collator or self._collate,
                **extra,
            )

        return make

    @staticmethod
    def _collate(examples):
        width = max(len(e["input_ids"]) for e in examples)
        rows = [e["input_ids"] for e in examples]
        return {
            "input_ids": torch.tensor([r + [0] * (width - len(r)) for r in rows]),
            "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]),
            "labels": torch.tensor([r + [-100] * (width - len(r)) for r in rows]),
        }

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
            {"gradient_checkpointing": True},
            {"label_smoothing_factor": 0.1},
            {"bf16": True},
        ],
        ids=["plain", "accumulation", "checkpointing", "label smoothing", "mixed precision"],
    )
    def test_losses_and_evaluation(self, texts, tokenizer, tmp_path, settings):
        make = self._make(texts, tokenizer, tmp_path, **settings)
        if settings.get("bf16"):
            stock, enabled = make(), make()
            handle = autopack.enable(enabled)
            assert losses(enabled) == pytest.approx(losses(stock), rel=2e-2)  # bfloat16 keeps 8 bits
        else:
            stock, enabled, handle = compare(make)
            assert enabled.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=DIGITS)
        assert avoided(handle) > 1000

    def test_a_loss_function_of_ones_own(self, texts, tokenizer, tmp_path):
        """It takes logits that are padded again, and gathers what it needs from them."""

        def loss(outputs, labels, num_items_in_batch=None):
            scores = outputs.logits[:, :-1].log_softmax(-1)
            targets = labels[:, 1:]
            chosen = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0]
            return -(chosen * (targets != -100)).sum() / num_items_in_batch

        _, _, handle = compare(self._make(texts, tokenizer, tmp_path, compute_loss_func=loss))
        assert avoided(handle) > 1000

    def test_metrics_of_predictions(self, texts, tokenizer, tmp_path):
        def metrics(predictions):
            logits, labels = predictions
            real = labels[:, 1:] != -100
            return {"accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:])[real].mean())}

        make = self._make(texts, tokenizer, tmp_path, compute_metrics=metrics)
        stock, enabled, _ = compare(make)
        found, wanted = enabled.predict(enabled.eval_dataset), stock.predict(stock.eval_dataset)
        assert found.metrics["test_accuracy"] == wanted.metrics["test_accuracy"]
        assert found.predictions.shape == wanted.predictions.shape
        assert enabled.evaluate()["eval_accuracy"] == stock.evaluate()["eval_accuracy"]

    def test_classification(self, texts, tokenizer, tmp_path):
        def collate(examples):
            batch = self._collate(examples)
            batch["labels"] = torch.tensor([len(e["input_ids"]) % 3 for e in examples])
            return batch

        def build_model(tokenizer):
            return build(tokenizer, "AutoModelForSequenceClassification", num_labels=3)

        def metrics(predictions):
            return {"accuracy": float((predictions[0].argmax(-1) == predictions[1]).mean())}

        make = self._make(texts, tokenizer, tmp_path, build_model, collate, compute_metrics=metrics)
        stock, enabled, handle = compare(make)
        assert enabled.evaluate()["eval_accuracy"] == stock.evaluate()["eval_accuracy"]
        assert avoided(handle) > 1000

    @pytest.mark.exhaustive
    def test_a_checkpoint_loads_without_autopack(self, texts, tokenizer, tmp_path):
        trainer = self._make(texts, tokenizer, tmp_path, max_steps=3)()
        autopack.enable(trainer)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        ids = [[5, 6, 7, 8, 9]]
        program = (
            "import sys, json, torch, transformers\n"
            f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'saved')!r})\n"
            f"print(json.dumps(model(torch.tensor({ids})).logits.tolist()))\n"
            "assert not any('autopack' in name for name in sys.modules)"
        )
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert not any("autopack" in path.read_text() for path in (tmp_path / "saved").glob("*.json"))
        expected = trainer.model.eval()(torch.tensor(ids)).logits
        found = torch.tensor(json.loads(finished.stdout.splitlines()[-1]))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


class TestTRL:
    """Trainers of TRL: policy and reference models are found, and the losses are those of stock."""

    @pytest.fixture(autouse=True)
    def _needs_trl(self):
        pytest.importorskip("trl")
        pytest.importorskip("datasets")

    @pytest.fixture(scope="class")
    def pairs(self, texts):
        import datasets

        half = len(texts) // 2
        return datasets.Dataset.from_list([
            {"prompt": f"{a[:20]}:", "chosen": f" {a}", "rejected": f" {b}"}
            for a, b in zip(texts[:half], texts[half:], strict=True)
        ])  # fmt: skip

    def test_sft(self, texts, tokenizer, tmp_path):
        import datasets
        import trl

        data = datasets.Dataset.from_list([{"text": text} for text in texts])

        def make():
            return trl.SFTTrainer(
                model=build(tokenizer),
                args=trl.SFTConfig(**arguments(tmp_path, max_length=128, bf16=False)),
                train_dataset=data,
                eval_dataset=data.select(range(40)),
                processing_class=tokenizer,
            )

        stock, enabled, handle = compare(make)
        assert avoided(handle) > 1000
        found, wanted = enabled.evaluate(), stock.evaluate()
        for name in ("eval_loss", "eval_mean_token_accuracy", "eval_entropy"):
            assert found[name] == pytest.approx(wanted[name], rel=DIGITS), name

    @pytest.mark.exhaustive
    def test_dpo(self, pairs, tokenizer, tmp_path):
        import trl

        def make():
            config = trl.DPOConfig(**arguments(tmp_path, learning_rate=1e-2, bf16=False))
            return trl.DPOTrainer(
                model=build(tokenizer),
                ref_model=build(tokenizer),
                args=config,
                train_dataset=pairs,
                eval_dataset=pairs.select(range(40)),
                processing_class=tokenizer,
            )

        stock, enabled, handle = compare(make, ("model", "ref_model"))
        assert avoided(handle) > 1000
        assert avoided(handle, "ref_model") > 1000
        found, wanted = enabled.evaluate(), stock.evaluate()
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=DIGITS)
        assert found["eval_rewards/accuracies"] == wanted["eval_rewards/accuracies"]

    @pytest.mark.exhaustive
    def test_kto(self, pairs, tokenizer, tmp_path):
        import trl

        data = pairs.map(
            lambda example, number: {
                "completion": example["chosen" if number % 2 else "rejected"],
                "label": bool(number % 2),
            },
            with_indices=True,
            remove_columns=["chosen", "rejected"],
        )

        def make():
            config = trl.KTOConfig(**arguments(tmp_path, max_steps=5, learning_rate=1e-2, bf16=False))
            return trl.KTOTrainer(
                model=build(tokenizer),
                ref_model=build(tokenizer),
                args=config,
                train_dataset=data,
                processing_class=tokenizer,
            )

        _, _, handle = compare(make, ("model", "ref_model"), steps=5)
        assert avoided(handle) > 100

    def test_reward(self, pairs, tokenizer, tmp_path):
        import trl

        data = pairs.map(lambda e: {"chosen": e["prompt"] + e["chosen"], "rejected": e["prompt"] + e["rejected"]})

        def make():
            return trl.RewardTrainer(
                model=build(tokenizer, "AutoModelForSequenceClassification", num_labels=1),
                args=trl.RewardConfig(**arguments(tmp_path, max_steps=5, bf16=False)),
                train_dataset=data.remove_columns("prompt"),
                processing_class=tokenizer,
            )

        _, _, handle = compare(make, steps=5)
        assert avoided(handle) > 100

    def test_grpo(self, pairs, tokenizer, tmp_path):
        """Generation is left as it is; log-probabilities of completions are computed without padding."""
        import trl

        def make():
            config = trl.GRPOConfig(**arguments(
                tmp_path, max_steps=3, bf16=False, num_generations=4, max_completion_length=12, temperature=1.0
            ))  # fmt: skip
            transformers.set_seed(0)
            return trl.GRPOTrainer(
                model=build(tokenizer),
                reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
                args=config,
                train_dataset=pairs.remove_columns(["chosen", "rejected"]),
                processing_class=tokenizer,
            )

        results = []
        for enable in (False, True):
            trainer = make()
            if enable:
                handle = autopack.enable(trainer)
            results.append(losses(trainer))
        assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-5)
        assert avoided(handle) > 0


def test_lightning(texts, tokenizer):
    """A Lightning module that holds a transformers model, and a loop that Lightning runs."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = build(tokenizer)
            self.seen = []

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    examples = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts[:64]]
    results = []
    for enable in (False, True):
        module = Module()
        if enable:
            handle = autopack.enable(module)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(examples, 8, collate_fn=TestTrainer._collate))
        results.append(module.seen)
    assert results[1] == pytest.approx(results[0], rel=DIGITS)
    assert handle.tally.batches == 8
