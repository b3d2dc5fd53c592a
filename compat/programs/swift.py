"""ms-swift: its command with its defaults, for each way of fine-tuning and of preferences, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "ms-swift==4.6.0" "transformers==5.19.0"
    ENV/bin/pip install -e .

LoRA has no dropout, so that steps can be compared. Its `--packing` and `--padding_free` want flash attention, and with
it a GPU: neither is among the runs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from compat.programs._words import save_model, text

NAME = "ms-swift"
PACKAGE = "ms-swift"
STAND_INS = ()
_PAIRS = {"dataset": "pairs"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, LoRA": ("sft", {}),
    "sft, full": ("sft", {"tuner_type": "full"}),
    "sft, LoRA, gradient accumulation": ("sft", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}),
    "pt, full": ("pt", {"tuner_type": "full", "dataset": "texts"}),
    "dpo, LoRA": ("rlhf", {"rlhf_type": "dpo", **_PAIRS}),
    "orpo, LoRA": ("rlhf", {"rlhf_type": "orpo", **_PAIRS}),
    "kto, LoRA": ("rlhf", {"rlhf_type": "kto", "dataset": "wishes"}),
    "rm, LoRA": ("rlhf", {"rlhf_type": "rm", **_PAIRS}),
}
"""The command of each run, and what it says beside the arguments that all have."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write a tiny Llama with a tokenizer of words, and data sets of random words."""
    save_model(folder / "model", "llama")
    draw = random.Random(0)

    def said(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": text(draw, most)}

    asked = [{"messages": [said("user", 20), said("assistant", 40)]} for _ in range(64)]
    sets: dict[str, list[dict[str, Any]]] = {
        "toy": asked,
        "texts": [{"messages": [said("assistant", 60)]} for _ in range(64)],
        "pairs": [{**one, "rejected_response": text(draw, 40)} for one in asked],
        "wishes": [{**one, "label": number % 2 == 0} for number, one in enumerate(asked)],
    }
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """Its launcher, and arguments."""
    which, said = RUNS[run]
    settings = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "default",
        "dataset": "toy",
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "max_length": 128,
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_steps": 4,
        "lora_dropout": 0,
        "use_cpu": "true",
        "use_hf": "true",
        **said,
    }
    settings["dataset"] = folder / f"{settings['dataset']}.jsonl"
    return [
        "-m",
        "swift.cli.main",
        which,
        *(part for name, value in settings.items() for part in (f"--{name}", str(value))),
    ]
