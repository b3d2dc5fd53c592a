"""Padded batches whose rows begin alike, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopack import tiny

PADDING = 0


def padded(rows: Sequence[torch.Tensor], side: str = "right", labels: bool = False) -> dict[str, torch.Tensor]:
    """Rows of tokens as a padded batch with its mask, and labels for every token where wanted."""
    columns = max(map(len, rows))
    ids, mask = torch.full((len(rows), columns), PADDING), torch.zeros(len(rows), columns, dtype=torch.long)
    for number, row in enumerate(rows):
        here = slice(len(row)) if side == "right" else slice(columns - len(row), None)
        ids[number, here], mask[number, here] = row, 1
    found = {"input_ids": ids, "attention_mask": mask}
    if labels:
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        found["labels"] = ids.masked_fill((mask == 0) | (before == 0), -100)
    return found


def group(prompt: int = 32, rests: Sequence[int] = (5, 11, 1, 8), seed: int = 0) -> list[torch.Tensor]:
    """Completions of so many tokens of one prompt."""
    drawn = tiny.tokens(None, 1, prompt + sum(rests), seed=seed)[0]
    return [torch.cat([drawn[:prompt], rest]) for rest in drawn[prompt:].split(list(rests))]


def tree(seed: int = 0) -> list[torch.Tensor]:
    """Rows of a tree: two prompts, below each a turn that two of three rows go on from; one row twice, one alone."""
    rows = []
    for number in range(2):
        drawn = tiny.tokens(None, 1, 90, seed=seed + number)[0]
        prompt, turn, *rests = drawn.split([20, 17, 5, 9, 12, 27])
        rows += [torch.cat([prompt, turn, rests[0]]), torch.cat([prompt, turn, rests[1]])]
        rows.append(torch.cat([prompt, rests[2]]))
    return [*rows, rows[0].clone(), tiny.tokens(None, 1, 7, seed=seed + 9)[0]]


def loss_of_logits(logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The mean log-likelihood of the tokens of a batch, as trainers compute it outside of the model."""
    real = batch["attention_mask"].bool()
    labels = batch["input_ids"].masked_fill(~real, -100)[:, 1:].masked_fill(~real[:, :-1], -100)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
