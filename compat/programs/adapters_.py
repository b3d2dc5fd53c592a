"""AdapterHub's `adapters`: its trainers with their defaults, for each kind of adapter, on random
words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import arguments, by_trainer


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Add a head and an adapter, and train it."""
    from adapters import AdapterTrainer, AutoAdapterModel
    from transformers import Trainer

    name, config = told["model"], told["adapter"]
    model: Any = AutoAdapterModel.from_pretrained(folder / name)
    if name == "llama":
        model.add_causal_lm_head("task")
    else:
        model.add_classification_head("task", num_labels=2)
    if config:
        model.add_adapter("task", config=config)
        model.train_adapter("task")
    settings = arguments(output, per_device_train_batch_size=8, remove_unused_columns=False)
    by_trainer(
        AdapterTrainer if config else Trainer, lambda: model, folder / name, 32, settings
    ).train()
