"""AdapterHub's `adapters`: its trainers with their defaults, for each kind of adapter, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "adapters==1.3.0" "transformers==4.57.6" accelerate
    ENV/bin/pip install -e .

The tiny models have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import save_model, text

NAME = "adapters"
PACKAGE = "adapters"
STAND_INS = ()
RUNS: dict[str, tuple[str, str]] = {
    "BERT, bottleneck": ("bert", "seq_bn"),
    "BERT, LoRA": ("bert", "lora"),
    "BERT, IA3": ("bert", "ia3"),
    "BERT, prefix tuning": ("bert", "prefix_tuning"),
    "BERT, prompt tuning": ("bert", "prompt_tuning"),
    "BERT, full, a head of its own": ("bert", ""),
    "Llama, bottleneck": ("llama", "seq_bn"),
    "Llama, LoRA": ("llama", "lora"),
}
"""The model of each run, and the configuration of its adapter."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the models."""
    save_encoder(folder / "bert")
    save_model(folder / "llama", "llama")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which adds an adapter and trains it."""
    return driven("adapters_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    from adapters import AdapterTrainer, AutoAdapterModel
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

    name, config = RUNS[run]
    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    model: Any = AutoAdapterModel.from_pretrained(folder / name)
    causal = name == "llama"
    if causal:
        model.add_causal_lm_head("task")
    else:
        model.add_classification_head("task", num_labels=2)
    if config:
        model.add_adapter("task", config=config)
        model.train_adapter("task")
    rows = [tokenizer(text(draw, 60), return_token_type_ids=False) for _ in range(32)]
    listed = [{**row} if causal else {**row, "labels": number % 2} for number, row in enumerate(rows)]
    arguments = TrainingArguments(
        output_dir=str(output / "out"),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = (AdapterTrainer if config else Trainer)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(listed),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) if causal else None,
    )
    trainer.train()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
