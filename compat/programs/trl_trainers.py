"""TRL: its trainers with their defaults (gradient checkpointing is one of them).

All but bf16, which TRL turns on: what it rounds differs by more than 1e-5 between rows of another
order. Rewards of generated texts are functions of their lengths and words. The share of pairs whose
chosen answer has the larger reward is not compared, where both rewards are zero in the first step
but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoTokenizer

from compat.programs._drivers import Steps, arguments, logged
from compat.programs._words import rows_of

_TEMPLATE = (
    "{% for one in messages %}{% if one['role'] == 'assistant' %}Assistant: {% generation %}{{ "
    "one['content'] }} </s>{% endgeneration %}{% else %}Human: {{ one['content'] }} {% endif %}{% "
    "endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


def prepare(folder: Path) -> None:
    """Give the tokenizer a template for messages."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder / "model")


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Train by the trainer that a run names, on its data."""
    told = dict(told)
    name, data = told.pop("trainer"), rows_of(folder / told.pop("data") / "train.jsonl")
    more: dict[str, Any] = {"reward_funcs": _reward} if [*data[0]] == ["prompt"] else {}
    if told.pop("peft", False):
        import peft

        kind = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        more["peft_config"] = peft.LoraConfig(task_type=kind, lora_dropout=0.0)
    made = getattr(trl, f"{name}Config")(**arguments(output, max_steps=8, bf16=False, **told))
    # as it is saved: TRL makes float32 of it where nothing is said
    made.model_init_kwargs = {**(made.model_init_kwargs or {}), "dtype": "auto"}
    trainer = getattr(trl, f"{name}Trainer")(
        model=str(folder / "model"), args=made, train_dataset=Dataset.from_list(data), **more
    )
    return logged(trainer, () if name == "Reward" else ("accuracies",))


def _reward(completions: list[str], **_: Any) -> list[float]:
    """How many words of a text have an even number, and a little for its length."""
    words = [[word for word in one.split() if word.startswith("w")] for one in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in each) + 0.01 * len(each) for each in words]
