"""DeepSpeed: transformers' Trainer with a DeepSpeed configuration for each stage of ZeRO, one
process on a CPU.

Each stage's configuration is that of transformers' documentation, with torch's AdamW in the place
of DeepSpeed's own, which would be compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import arguments, by_trainer

_AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Train by a stage of ZeRO."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

    plain = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    configuration = {"zero_optimization": told["zero"], **plain, **dict.fromkeys(_AUTO, "auto")}
    # Before the model, which ZeRO-3 makes in parts.
    settings = arguments(output, optim="adamw_torch", deepspeed=configuration)
    where = folder / told["model"]
    kind: Any = (
        AutoModelForCausalLM if told["model"] == "llama" else AutoModelForSequenceClassification
    )
    by_trainer(Trainer, lambda: kind.from_pretrained(where), where, 16, settings).train()
