"""DeepSpeed: transformers' Trainer with a DeepSpeed configuration for each stage of ZeRO, one process on a CPU.

    python3 -m venv ENV
    ENV/bin/pip install "torch==2.13.0" "deepspeed==0.19.8" "transformers==5.16.1" accelerate datasets
    ENV/bin/pip install -e .

Each stage's configuration is that of transformers' documentation, with torch's AdamW in the place of DeepSpeed's own,
which would be compiled. The tiny models have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import save_model, text

NAME = "DeepSpeed"
PACKAGE = "deepspeed"
STAND_INS = ()
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, ZeRO-1": ("llama", {"stage": 1}),
    "Llama, ZeRO-2": ("llama", {"stage": 2}),
    "Llama, ZeRO-2, optimizer on the host": ("llama", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    "Llama, ZeRO-3": ("llama", {"stage": 3}),
    "BERT, ZeRO-2": ("bert", {"stage": 2}),
    "BERT, ZeRO-3": ("bert", {"stage": 3}),
}
"""The model of each run, and what its configuration says of ZeRO."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the models."""
    save_encoder(folder / "bert", "bert", "AutoModelForSequenceClassification", num_labels=2)
    save_model(folder / "llama", "llama")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return [*launcher, *driven("deepspeed_", run, folder, output)]


def _train(run: str, folder: Path, output: Path) -> None:
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    name, zero = RUNS[run]
    draw, causal = random.Random(0), name == "llama"
    configuration = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    arguments = TrainingArguments(
        output_dir=str(output / "out"),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=4,
        optim="adamw_torch",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        deepspeed=configuration,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    kind: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    rows = [tokenizer(text(draw, 60), return_token_type_ids=False) for _ in range(16)]
    listed = [{**row} if causal else {**row, "labels": number % 2} for number, row in enumerate(rows)]
    Trainer(
        model=kind.from_pretrained(folder / name),
        args=arguments,
        train_dataset=Dataset.from_list(listed),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) if causal else None,
    ).train()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
