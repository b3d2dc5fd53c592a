"""A trainer of a tiny Llama on a few documents, sound by itself, of which exhibits change one
thing."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = 64


def model(**settings: Any) -> LlamaForCausalLM:
    """Return a tiny Llama."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **special, **settings}))


def documents(count: int = 24, least: int = 5, most: int = 20) -> list[list[int]]:
    """Return documents of random tokens, each between its special tokens."""
    draw = random.Random(0)
    bodies = [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(least, most) - 2)]
        for _ in range(count)
    ]
    return [[BOS, *body, EOS] for body in bodies]


def examples(**columns: Callable[[list[int]], Any]) -> Dataset:
    """Return a data set of documents, with more columns made of each one's tokens."""
    rows = documents()
    return Dataset.from_dict(
        {"input_ids": rows, **{name: list(map(make, rows)) for name, make in columns.items()}}
    )


def padded(rows: Sequence[Sequence[int]], fill: int, left: bool = False) -> torch.Tensor:
    """Return rows of one length."""
    longest = max(map(len, rows))
    fills = [[fill] * (longest - len(row)) for row in rows]
    return torch.tensor(
        [[*more, *row] if left else [*row, *more] for row, more in zip(rows, fills, strict=True)]
    )


def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a padded batch: labels are the tokens, or those that the examples have."""
    rows = [each["input_ids"] for each in features]
    labels = [each.get("labels", each["input_ids"]) for each in features]
    mask = padded([[1] * len(row) for row in rows], 0)
    return {"input_ids": padded(rows, PAD), "attention_mask": mask, "labels": padded(labels, -100)}


def packed(
    features: Sequence[dict[str, Any]], first_label: int | None = -100
) -> dict[str, torch.Tensor]:
    """Return a row of all documents, told apart by their positions; `first_label` stands at their
    first tokens."""
    rows = [each["input_ids"] for each in features]
    begun = [row if first_label is None else [first_label, *row[1:]] for row in rows]
    parts = {"input_ids": rows, "labels": begun, "position_ids": [range(len(row)) for row in rows]}
    return {
        name: torch.tensor([[value for part in each for value in part]])
        for name, each in parts.items()
    }


def trainer(
    kind: type[Trainer] = Trainer,
    collator: Any = collate,
    data: Any = None,
    net: Any = None,
    evaluated: Any = None,
    **settings: Any,
) -> Trainer:
    """Return a trainer with two micro-batches of four documents in a step."""
    arguments = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": [],
    }
    arguments |= {
        "per_device_eval_batch_size": 4,
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    return kind(
        model=net or model(use_cache=False),
        args=TrainingArguments(tempfile.mkdtemp(), **{**arguments, **settings}),
        data_collator=collator,
        train_dataset=examples() if data is None else data,
        eval_dataset=evaluated,
    )
