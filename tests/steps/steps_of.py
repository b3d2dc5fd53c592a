"""Train tiny models for a few steps, with and without `max_tokens`: losses and gradient norms of
each step."""

import tempfile
from itertools import chain

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

import autopack
from autopack import tiny
from tests.support.trained import QUIET
from tests.support.training_calls import noisy

_DRAW = np.random.default_rng(0)
LENGTHS = np.clip(_DRAW.lognormal(2.5, 0.8, 120), 3, 60).astype(int)
DOCUMENTS = [{"input_ids": _DRAW.integers(5, 90, length).tolist()} for length in LENGTHS]
MOST = 64


def padded(rows, fill, left=False):
    longest = max(map(len, rows))
    return torch.tensor(
        [(fill * (longest - len(r)) + r) if left else (r + fill * (longest - len(r))) for r in rows]
    )


def texts(examples, left=False):
    rows = [each["input_ids"] for each in examples]
    mask = padded([[1] * len(row) for row in rows], [0], left)
    return {
        "input_ids": padded(rows, [0], left),
        "labels": padded(rows, [-100], left),
        "attention_mask": mask,
    }


def on_the_left(examples):
    batch = texts(examples, left=True)
    starts = batch["attention_mask"].argmax(1)
    # what stock predicts at padding is no target
    batch["labels"][torch.arange(len(starts)), starts] = -100
    return batch


def packed(examples):
    rows = [each["input_ids"] for each in examples]
    positions, labels = [list(range(len(row))) for row in rows], [[-100, *row[1:]] for row in rows]
    found = {"input_ids": rows, "labels": labels, "position_ids": positions}
    return {
        name: torch.tensor([list(chain.from_iterable(values))]) for name, values in found.items()
    }


def classes(examples):
    batch = texts(examples)
    return {**batch, "labels": torch.tensor([sum(each["input_ids"]) % 2 for each in examples])}


def pairs(examples):
    """Return sources, and targets of half their lengths."""
    batch, rows = texts(examples), [each["input_ids"] for each in examples]
    return {**batch, "labels": padded([row[: 1 + len(row) // 2] for row in rows], [-100])}


def trainer(
    model_type,
    collate,
    task="causal-lm",
    batch=4,
    accumulate=4,
    steps=6,
    kind=Trainer,
    change=None,
    **settings,
):
    """Return a trainer of a tiny model without dropout."""
    torch.manual_seed(0)
    model = noisy(tiny.build(model_type, task=task), 0.0)
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        logging_steps=1,
        remove_unused_columns=False,
        learning_rate=1e-3,
        include_num_input_tokens_seen="all",
        **{**QUIET, **settings},
    )
    return kind(model, args, data_collator=collate, train_dataset=DOCUMENTS)


def trained(made, most=None):
    """Return losses and gradient norms of each step, (steps, 2) float64, and the tokens that it has
    counted."""
    autopack.enable(made, max_tokens=most)
    made.train()
    logged = [
        (each["loss"], each["grad_norm"]) for each in made.state.log_history if "loss" in each
    ]
    return torch.tensor(logged, dtype=torch.float64), made.state.num_input_tokens_seen
