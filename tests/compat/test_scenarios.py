"""What people do with a model, in every release: a trainer, generation, checkpointing, the demo, taking it back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.demo import ENABLED, DemoSettings, compare

LENGTHS = (17, 5, 9, 30, 3, 12, 8, 21)


def texts(model: Any) -> list[dict[str, list[int]]]:
    """A small data set of documents of different lengths."""
    return [{"input_ids": tiny.tokens(model.config, n, seed=n).tolist()} for n in LENGTHS]


def pad(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """What the usual collator for language modelling makes of examples, without its tokenizer."""
    longest = max(len(example["input_ids"]) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for example in examples:
        ids, rest = example["input_ids"], longest - len(example["input_ids"])
        rows["input_ids"].append(ids + [0] * rest)
        rows["attention_mask"].append([1] * len(ids) + [0] * rest)
        rows["labels"].append(ids + [-100] * rest)
    return {name: torch.tensor(values) for name, values in rows.items()}


class Trainer(transformers.Trainer):
    """A trainer that keeps the losses of its steps as they are: those that it logs are rounded."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The step of transformers, whatever its arguments are in this release."""
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def losses(model: Any, directory: Path, enabled: bool, **options: Any) -> list[float]:
    """The losses of every step of a `transformers.Trainer` on padded batches."""
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(model), data_collator=pad)
    if enabled:
        autopack.enable(trainer)
    trainer.train()
    return trainer.losses


@pytest.fixture
def stock(model_type: str, mode: str) -> Any:
    """A tiny random model that autopack has not touched."""
    return tiny.build(model_type, attn_implementation=mode)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_trainer_with_padded_batches(stock: Any, checkpointing: bool, tmp_path: Path) -> None:
    """A script that pads trains as it did: every loss is stock's, and no padding is computed."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    options = options if checkpointing else {}
    model = copy.deepcopy(stock)
    wanted = losses(stock, tmp_path, False, **options)
    found = losses(model, tmp_path, True, **options)
    assert len(wanted) == 4
    assert found == pytest.approx(wanted, rel=1e-5)
    tally = autopack.enable(model).tally
    assert (tally.batches, tally.left) == (4, {}), str(tally)


def test_generate(stock: Any) -> None:
    """An enabled model generates the tokens of stock, from one prompt and from prompts padded on the left."""
    model = copy.deepcopy(stock)
    autopack.enable(model)
    prompts = tiny.tokens(stock.config, 2, 9)
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0
    for arguments in ({"input_ids": prompts[:1]}, {"input_ids": prompts, "attention_mask": mask}):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            wanted, found = (each.generate(**arguments, **options) for each in (stock, model))
        assert torch.equal(found, wanted)


def test_disable_restores(stock: Any) -> None:
    """After `disable` nothing of autopack is left on the model: attributes, hooks, forwards and results are stock's."""

    def state() -> list[Any]:
        return [(set(vars(m)), list(m._forward_pre_hooks), list(m._forward_hooks)) for m in stock.modules()]

    ids = tiny.tokens(stock.config, 1, 12)
    stock(input_ids=ids, output_hidden_states=True)  # some releases leave forwards on layers whose outputs they collect
    logits, before = stock(input_ids=ids).logits, state()
    autopack.enable(stock)
    autopack.disable(stock)
    assert state() == before
    assert torch.equal(stock(input_ids=ids).logits, logits)
    assert state() == before


@pytest.mark.exhaustive
def test_demo() -> None:
    """The demo: packed rows with autopack have the losses of padded training."""
    result = compare(DemoSettings(steps=3, batch_size=6, longest=96, size="small"))
    assert result.same(ENABLED)
