"""LLaMA-Factory: its command with its defaults, for each stage and way of fine-tuning, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "llamafactory==0.9.5" && ENV/bin/pip install -e .

Its data loader imports torchaudio, whose builds each want one release of torch: where it cannot be imported, an empty
module stands in for it, which nothing here calls.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from compat.programs._words import save_model, text

NAME = "LLaMA-Factory"
PACKAGE = "llamafactory"
STAND_INS = ("torchaudio",)
_LAYERS = {"freeze_trainable_layers": 1}
RUNS: dict[str, dict[str, Any]] = {
    "sft, full": {"finetuning_type": "full"},
    "sft, LoRA": {"finetuning_type": "lora"},
    "sft, freeze": {"finetuning_type": "freeze", **_LAYERS},
    "sft, full, gradient accumulation": {"finetuning_type": "full", "gradient_accumulation_steps": 2},
    "sft, full, packing": {"finetuning_type": "full", "packing": True},
    "sft, full, neat packing": {"finetuning_type": "full", "neat_packing": True, "flash_attn": "disabled"},
    "pt, full": {"stage": "pt", "finetuning_type": "full", "dataset": "texts"},
    "dpo, LoRA": {"stage": "dpo", "finetuning_type": "lora", "dataset": "pairs"},
    "dpo, ORPO loss": {"stage": "dpo", "finetuning_type": "lora", "dataset": "pairs", "pref_loss": "orpo"},
    "rm, LoRA": {"stage": "rm", "finetuning_type": "lora", "dataset": "pairs"},
    "kto, LoRA": {"stage": "kto", "finetuning_type": "lora", "dataset": "wishes"},
}
"""What each run says beside the arguments that all have; everything else is LLaMA-Factory's default."""
APART = frozenset(("sft, full, packing", "pt, full"))
"""Runs whose rows hold several documents that stock lets see each other, so that losses differ by that."""


def prepare(folder: Path) -> None:
    """Write a tiny Llama with a tokenizer of words, and data sets of random words."""
    save_model(folder / "model", "llama")
    written = folder / "model" / "config.json"
    # TRL's head of values has dropout where a configuration says nothing of it, and steps are to be compared.
    written.write_text(json.dumps({**json.loads(written.read_text()), "summary_dropout_prob": 0.0}))
    draw = random.Random(0)
    asked = [{"instruction": text(draw, 20), "input": "", "output": text(draw, 40)} for _ in range(64)]
    sets: dict[str, list[dict[str, Any]]] = {
        "toy": asked,
        "texts": [{"text": text(draw, 60)} for _ in range(64)],
        "pairs": [
            {"instruction": text(draw, 20), "input": "", "chosen": text(draw, 40), "rejected": text(draw, 40)}
            for _ in range(64)
        ],
        "wishes": [{**one, "kto_tag": number % 2 == 0} for number, one in enumerate(asked)],
    }
    columns = {"prompt": "instruction", "query": "input"}
    answers = {"chosen": "chosen", "rejected": "rejected"}
    described: dict[str, dict[str, Any]] = {
        "toy": {},
        "texts": {"columns": {"prompt": "text"}},
        "pairs": {"ranking": True, "columns": {**columns, **answers}},
        "wishes": {"columns": {**columns, "response": "output", "kto_tag": "kto_tag"}},
    }
    (folder / "data").mkdir()
    for name, rows in sets.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
        described[name]["file_name"] = f"{name}.json"
    (folder / "data" / "dataset_info.json").write_text(json.dumps(described))


def command(run: str, folder: Path, output: Path) -> list[str]:
    """Its launcher, and a file of settings."""
    settings = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder / "data"),
        "dataset": "toy",
        "template": "default",
        "cutoff_len": 128,
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 1,
        **RUNS[run],
    }
    file = output.with_suffix(".yaml")  # JSON is YAML, and its reader of .json files raises
    file.write_text(json.dumps(settings))
    return ["-m", "llamafactory.launcher", str(file)]
