"""Attention masks of four dimensions that the caller has prepared: what they say of tokens and documents."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from autopack.layout.packed import PackedLayout

_HIDDEN = -9_900
"""What is added to scores that are not to count is this or less: -1e4 was usual, and is -9984 in bfloat16."""


class Agreement(Enum):
    """What a prepared mask lets tokens see, compared with the documents that are declared beside it."""

    SAME = "what a causal model lets them see of their documents"
    APART = "nothing of other documents, and something else than that of their own"
    CROSSES = "tokens of other documents"


def is_readable(mask: Any, shape: tuple[int, int]) -> bool:
    """Whether it is a tensor (rows or 1, heads or 1, columns, columns), boolean or added to the scores."""
    rows, columns = shape
    return (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 4
        and mask.shape[0] in (1, rows)
        and mask.shape[2:] == (columns, columns)
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )


def sees_itself(mask: torch.Tensor) -> torch.Tensor:
    """The tokens that see themselves, bool (rows or 1, columns); those that do not are padding."""
    return _seen(mask.diagonal(dim1=2, dim2=3)).any(1)


def agreement(mask: torch.Tensor, layout: PackedLayout) -> Agreement:
    """What a readable mask lets tokens see; copies one number from the device."""
    seen, documents = _seen(mask), layout.seq_idx.to(mask.device)
    together = (documents[:, :, None] == documents[:, None, :])[:, None]
    real = sees_itself(mask).expand(layout.rows, layout.columns)
    tokens = (real[:, :, None] & real[:, None, :])[:, None]
    crosses = (seen & tokens & ~together).any()
    differs = ((seen != together.tril()) & tokens).any()
    if mask.is_floating_point():
        differs |= (seen & (mask != 0)).any()
    found = int(crosses.long() * 2 + differs.long())
    return Agreement.CROSSES if found > 1 else Agreement.APART if found else Agreement.SAME


def hiding_for_good(mask: Any) -> Any:
    """A mask that hides the same, however large the scores are: itself, where it does so already or is of no floats."""
    if not (isinstance(mask, torch.Tensor) and mask.is_floating_point()):
        return mask
    least = torch.finfo(mask.dtype).min
    doubtful = ~_seen(mask) & (mask > least / 2)
    return mask.masked_fill(doubtful, least) if bool(doubtful.any()) else mask


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > _HIDDEN
