"""A trainer of a tiny Llama on a few documents, sound by itself, of which exhibits change one
thing."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from autopack import tiny

PAD, BOS, EOS = 0, 1, 2
VOCABULARY, COUNT = 64, 24


def model(kind: str = "llama", task: str = "causal-lm", **settings: Any) -> Any:
    """Return a tiny model."""
    special: Any = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return tiny.build(kind, task=task, vocab_size=VOCABULARY, **special, **settings)


def documents() -> list[list[int]]:
    """Return documents of random tokens, each between its special tokens."""
    draw = random.Random(0)
    bodies = [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(3, 18))] for _ in range(COUNT)
    ]
    return [[BOS, *body, EOS] for body in bodies]


def examples(**columns: Callable[[list[int]], Any]) -> Dataset:
    """Return a data set of documents, with more columns made of each one's tokens."""
    rows = documents()
    return Dataset.from_dict(
        {"input_ids": rows, **{name: list(map(make, rows)) for name, make in columns.items()}}
    )


def padded(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Return rows of one length."""
    return pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=fill)


def collate(features: Sequence[dict[str, Any]], labels: Any = None) -> dict[str, torch.Tensor]:
    """Return a padded batch: labels are these, those of the examples, or the tokens."""
    rows = [each["input_ids"] for each in features]
    labels = labels or [each.get("labels", each["input_ids"]) for each in features]
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
    loss: Any = None,
    **settings: Any,
) -> Trainer:
    """Return a trainer with two micro-batches of four documents in a step."""
    arguments = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    return kind(
        model=net or model(use_cache=False),
        args=TrainingArguments(tempfile.mkdtemp(), **{**arguments, **settings}),
        data_collator=collator,
        train_dataset=examples() if data is None else data,
        eval_dataset=evaluated,
        compute_loss_func=loss,
    )


def differing(arguments: dict[str, Any]) -> Trainer:
    """Return a trainer that differs by arguments: its `model` by those of one, and data sets that
    are made now."""
    made = {n: value() if n in ("data", "evaluated") else value for n, value in arguments.items()}
    net = model(**made.pop("model")) if "model" in made else None
    return trainer(net=net, **made)
