"""TRL: its trainers with their defaults (gradient checkpointing is one of them), and its
experimental ones.

All but bf16, which TRL turns on: what it rounds differs by more than 1e-5 between rows of another
order. Rewards of generated texts are functions of their lengths and words. What ORPO, CPO and
online DPO log of all columns, padding too, is not compared, as there is nothing at padding; nor is
the share of pairs whose chosen answer has the larger reward, where both rewards are zero in the
first step but for rounding."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import rows_of

_OF_ALL_COLUMNS = {
    **dict.fromkeys(("ORPO", "CPO"), ("logits/",)),
    "OnlineDPO": (
        "objective/kl",
        "objective/entropy",
        "objective/non_score_reward",
        "objective/rlhf_reward",
    ),
}
"""What trainers log of all columns, padding too; their losses do not read it."""
_TEMPLATE = (
    "{% for one in messages %}{% if one['role'] == 'assistant' %}Assistant: {% generation %}{{ "
    "one['content'] }} </s>{% endgeneration %}{% else %}Human: {{ one['content'] }} {% endif %}{% "
    "endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def prepare(folder: Path) -> None:
    """Give the tokenizers a template for messages."""
    from transformers import AutoTokenizer

    for name in ("model", "teacher"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.chat_template = _TEMPLATE
        tokenizer.save_pretrained(folder / name)


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the trainer that a run names, on its data."""
    from datasets import Dataset

    told = dict(told)
    place, data = told.pop("trainer"), rows_of(folder / told.pop("data") / "train.jsonl")
    adapted, taught = told.pop("peft", False), told.pop("teacher", False)
    module, _, name = place.rpartition(".")
    at = importlib.import_module(f"trl.{module}" if module else "trl")
    made = getattr(at, f"{name}Config")(**arguments(output, max_steps=8, bf16=False, **told))
    # as it is saved: TRL makes float32 of it where nothing is said
    if hasattr(made, "model_init_kwargs"):
        made.model_init_kwargs = {**(made.model_init_kwargs or {}), "dtype": "auto"}
    more: dict[str, Any] = {"reward_funcs": _reward} if [*data[0]] == ["prompt"] else {}
    if adapted:
        import peft

        kind = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        more["peft_config"] = peft.LoraConfig(task_type=kind, lora_dropout=0.0)
    if taught:
        more["teacher_model"] = str(folder / "teacher")
    if name in ("ORPO", "CPO", "OnlineDPO", "GKD", "GMPO"):
        from transformers import AutoTokenizer

        more["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = str(folder / "model")
    if name in ("ORPO", "CPO", "OnlineDPO"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model)
    more["train_dataset"] = Dataset.from_list(data)
    trainer = getattr(at, f"{name}Trainer")(model=model, args=made, **more)
    return logged(
        trainer, () if name == "Reward" else ("accuracies", *_OF_ALL_COLUMNS.get(name, ()))
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    """How many words of a text have an even number, and a little for its length."""
    words = [[word for word in one.split() if word.startswith("w")] for one in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in each) + 0.01 * len(each) for each in words]
