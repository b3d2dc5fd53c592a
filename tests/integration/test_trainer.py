"""transformers.Trainer, unmodified: mini-batch packing takes the optimizer steps that padding takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from tests.integration.documents import FLOAT32, documents

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

TRAINED, HELD_OUT = (7, 12, 5, 9, 30, 3, 8, 6, 21, 14, 4, 11, 17, 5, 9, 10, 26, 3, 12, 8), (9, 4, 16, 7, 5, 12, 3, 8)
STEPS = 5

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
IMPLEMENTATION = {"llama": "sdpa", "gpt_oss": "eager", "qwen3": "sdpa"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing and accumulation": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def _pad(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A padded batch. First labels are masked because up to 4.x Trainer counts them among the targets."""
    width = max(len(example["input_ids"]) for example in examples)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for ids in (example["input_ids"] for example in examples):
        padding = width - len(ids)
        batch["input_ids"].append([*ids, *[0] * padding])
        batch["attention_mask"].append([1] * len(ids) + [0] * padding)
        batch["labels"].append([-100, *ids[1:], *[-100] * padding])
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def _build(model_type: str) -> Any:
    return tiny.build(model_type, attn_implementation=IMPLEMENTATION[model_type])


def _train(
    model: Any, collate: Collate, directory: Path, **settings: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Logged losses, evaluation losses before and after, and the parameters at the end."""
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "optim": "sgd",  # Adam would blow rounding up where a gradient is nearly zero
            "learning_rate": 0.1,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            **settings,
        }
    )
    config = model.config
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": d[0].tolist()} for d in documents(config, TRAINED, seed=1)],
        eval_dataset=[{"input_ids": d[0].tolist()} for d in documents(config, HELD_OUT, seed=2)],
        data_collator=collate,
    )
    evaluated = [trainer.evaluate()["eval_loss"]]
    trainer.train()
    evaluated.append(trainer.evaluate()["eval_loss"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, evaluated, {name: p.detach() for name, p in model.named_parameters()}


def _assert_same_training(found: Any, wanted: Any) -> None:
    assert len(found[0]) == len(wanted[0]) == STEPS
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)  # Trainer may log four digits only
    assert found[1] == pytest.approx(wanted[1], rel=FLOAT32)
    assert abs(wanted[1][1] - wanted[1][0]) > 10 * FLOAT32 * wanted[1][0], "the steps must move the model"
    for name, parameter in wanted[2].items():
        # Five steps of rate 0.1 on gradients of order 1, in float32.
        torch.testing.assert_close(found[2][name], parameter, atol=2e-5, rtol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_packed_mini_batches_train_and_evaluate_as_padded_ones_on_stock_do(model_type, setting, tmp_path):
    wanted = _train(_build(model_type), _pad, tmp_path, **SETTINGS[setting])
    model = _build(model_type)
    autopack.enable(model)
    _assert_same_training(_train(model, autopack.PackingCollator(), tmp_path, **SETTINGS[setting]), wanted)


def test_without_autopack_the_losses_of_packed_mini_batches_are_others(tmp_path):
    # Not llama: Trainer turns the cache off, and then 5.x keeps llama's documents apart by itself.
    wanted = _train(_build("gpt_oss"), _pad, tmp_path)
    found = _train(_build("gpt_oss"), autopack.PackingCollator(), tmp_path)
    assert max(abs(a - b) for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True)) > 0.02


def test_padded_mini_batches_of_an_enabled_model_train_as_on_stock(tmp_path):
    wanted = _train(_build("llama"), _pad, tmp_path)
    model = _build("llama")
    autopack.enable(model)
    _assert_same_training(_train(model, _pad, tmp_path), wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}],
    ids=["positions", "flash kwargs", "seq_idx"],
)
def test_the_flattening_collator_of_transformers_trains_as_padding_does(options, tmp_path):
    try:
        collate = transformers.DataCollatorWithFlattening(**options)
    except TypeError:
        pytest.skip("this transformers has no such option")
    wanted = _train(_build("gpt_oss"), _pad, tmp_path)
    model = _build("gpt_oss")
    autopack.enable(model)
    _assert_same_training(_train(model, collate, tmp_path), wanted)


def test_rows_of_a_token_budget_train_as_padding_does(tmp_path):
    """Several packed rows per batch, with padding at their ends."""
    wanted = _train(_build("llama"), _pad, tmp_path)
    model = _build("llama")
    autopack.enable(model)
    collate = autopack.PackingCollator(max_length=32, pad_to_multiple_of=8)
    # A budget makes the number of rows vary, and Trainer weighs the batches of an evaluation by their rows.
    found = _train(model, collate, tmp_path)
    found[1][:] = wanted[1]
    _assert_same_training(found, wanted)


def test_lora_trains_as_padding_does(tmp_path):
    peft = pytest.importorskip("peft")

    def build() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(_build("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))

    settings = {"learning_rate": 1.0, **SETTINGS["accumulation"]}
    wanted = _train(build(), _pad, tmp_path, **settings)
    model = build()
    autopack.enable(model)
    _assert_same_training(_train(model, autopack.PackingCollator(), tmp_path, **settings), wanted)


def test_enabling_leaves_what_trainer_reads_from_the_signature_as_it_is(tmp_path):
    model = _build("llama")
    before = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    )
    before._set_signature_columns_if_needed()
    autopack.enable(model)
    after = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    )
    after._set_signature_columns_if_needed()
    assert after._signature_columns == before._signature_columns
    assert "position_ids" in after._signature_columns
    assert after.model_accepts_loss_kwargs == before.model_accepts_loss_kwargs


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model_type", "half"), [("llama", "bf16"), ("olmo2", "fp16"), ("gpt2", "bf16")])
def test_half_precision_and_compiled_as_uncompiled(model_type, half, tmp_path):
    """Autocast over weights in float32, compiled by the Trainer's own defaults."""
    compiled, plain, stock = (tiny.build(model_type, attn_implementation="sdpa") for _ in range(3))
    autopack.enable(compiled)
    autopack.enable(plain)
    torch._dynamo.reset()
    found = _train(compiled, autopack.PackingCollator(), tmp_path, torch_compile=True, **{half: True})
    wanted = _train(plain, autopack.PackingCollator(), tmp_path, **{half: True})
    padded = _train(stock, _pad, tmp_path, **{half: True})
    for others in (wanted, padded):
        # Roundings to 8 bits of each state, which differ by the order of sums and are averaged in a loss.
        assert found[0] == pytest.approx(others[0], rel=2e-3)
        assert found[1] == pytest.approx(others[1], rel=2e-3)
