"""Train tiny models for a few steps, with and without `max_tokens`: losses and gradient norms of
each step."""

import tempfile

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

import autopack
from autopack import tiny
from tests.engine import in_rows, padded_batch
from tests.support.trained import QUIET
from tests.support.training_calls import noisy

_DRAW = np.random.default_rng(0)
LENGTHS = np.clip(_DRAW.lognormal(2.5, 0.8, 120), 3, 60).astype(int)
DOCUMENTS = [{"input_ids": _DRAW.integers(5, 90, length).tolist()} for length in LENGTHS]
MOST = 64


def rows_of(examples):
    return [torch.tensor(each["input_ids"]) for each in examples]


def texts(examples, side="right"):
    batch = padded_batch(rows_of(examples), side)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def on_the_left(examples):
    batch = texts(examples, "left")
    starts = batch["attention_mask"].argmax(1)
    # what stock predicts at padding is no target
    batch["labels"][torch.arange(len(starts)), starts] = -100
    return batch


packed = autopack.PackingCollator()


def classes(examples):
    batch = texts(examples)
    return {**batch, "labels": torch.tensor([sum(each["input_ids"]) % 2 for each in examples])}


def pairs(examples):
    """Return sources, and targets of half their lengths."""
    targets = [row[: 1 + len(row) // 2] for row in rows_of(examples)]
    return {**texts(examples), "labels": in_rows(targets, value=-100)}


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
