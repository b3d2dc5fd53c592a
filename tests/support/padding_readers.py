"""Models and batches for those who read what a model gives at padding."""

import copy

import torch

from autopack import tiny
from tests.subjects import without_dropout

EXACT, WRONG = 1e-5, 1e-3
"""Relative, of a loss in float32: rounding leaves about 1e-7, and zeros at padding change these by
1e-2 and more."""


IS_READ = "was read at padding"


def backbone(model_type="bert"):
    """Return the backbone of a tiny model in train mode."""
    model = tiny.build(model_type, task="masked-lm" if model_type == "bert" else "causal-lm")
    return model.base_model.train()


def twins(model):
    """Return a copy of a model and the model, both without dropout."""
    return copy.deepcopy(without_dropout(model)), model


def batch(model, lengths=(11, 6, 4), seed=0):
    """Return a padded batch of random tokens with its attention mask."""
    ids = tiny.tokens(model.config, len(lengths), max(lengths), seed=seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id or 0),
        "attention_mask": mask,
    }


def same_gradients(model, stock):
    """Return True if two models have the same gradients, within rounding."""
    found, wanted = (
        torch.cat([p.grad.flatten() for p in which.parameters() if p.grad is not None])
        for which in (model, stock)
    )
    return bool((found - wanted).abs().max() < EXACT * wanted.abs().max())
