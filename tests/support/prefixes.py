"""Padded batches whose rows begin alike, for tests."""

import torch

from autopack import tiny
from tests.engine import padded_batch
from tests.support.padded import unpredicted


def padded(rows, side="right", labels=False):
    """Return rows of tokens as a padded batch with its mask, with labels if asked for."""
    found = padded_batch(rows, side)
    if labels:
        found["labels"] = found["input_ids"].masked_fill(unpredicted(found["attention_mask"]), -100)
    return found


def group(prompt=32, rests=(5, 11, 1, 8), seed=0):
    """Return rows of one prompt, each with a completion of so many tokens of its own."""
    drawn = tiny.tokens(None, 1, prompt + sum(rests), seed=seed)[0]
    return [torch.cat([drawn[:prompt], rest]) for rest in drawn[prompt:].split(list(rests))]


def tree(seed=0):
    """Return rows that form a tree of two prompts, below each a turn that two of three rows share.

    One row is there twice, and one begins like no other.
    """
    rows = []
    for number in range(2):
        drawn = tiny.tokens(None, 1, 90, seed=seed + number)[0]
        prompt, turn, *rests = drawn.split([20, 17, 5, 9, 12, 27])
        rows += [torch.cat([prompt, turn, rests[0]]), torch.cat([prompt, turn, rests[1]])]
        rows.append(torch.cat([prompt, rests[2]]))
    return [*rows, rows[0].clone(), tiny.tokens(None, 1, 7, seed=seed + 9)[0]]
