"""Masks prepared by the caller: of four dimensions for pairs of tokens, or for tokens and images.

Processors write masks of tokens and images; the documents of a packed row lie along their diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout

_HIDDEN = -9_900
"""Largest value added to a score to hide it: -1e4 was usual, and is -9984 in bfloat16."""
_FOR_GOOD = -1e8
"""Largest value that hides a score however large it is; in dtypes of less range, half of the least
number."""


def is_readable(mask: Any, shape: tuple[int, int]) -> bool:
    """Return True for a mask (rows or 1, heads or 1, columns, columns), boolean or additive."""
    rows, columns = shape
    return (
        isinstance(mask, Tensor)
        and mask.dim() == 4
        and mask.shape[0] in (1, rows)
        and mask.shape[2:] == (columns, columns)
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )


def sees_itself(mask: Tensor) -> Tensor:
    """Return (rows or 1, columns), False where a readable mask hides a token from itself."""
    return _seen(mask.diagonal(dim1=2, dim2=3)).any(1)


def agreement(mask: Tensor, layout: PackedLayout) -> Literal["same", "apart", "crosses"]:
    """Return "same", "apart" or "crosses" for a readable mask; copies one number from the device.

    "same": it shows tokens what a causal model lets them see of their documents. "apart": it keeps
    documents apart by another rule. "crosses": it shows tokens of other documents.
    """
    seen, documents = _seen(mask), layout.seq_idx.to(mask.device)
    together = (documents[:, :, None] == documents[:, None, :])[:, None]
    real = sees_itself(mask).expand(layout.shape)
    tokens = (real[:, :, None] & real[:, None, :])[:, None]
    crosses = (seen & tokens & ~together).any()
    differs = ((seen != together.tril()) & tokens).any()
    if mask.is_floating_point():
        differs |= (seen & (mask != 0)).any()
        # One that has a way of its own is used, and large scores get past -1e4.
        gets_past = mask > max(_FOR_GOOD, torch.finfo(mask.dtype).min / 2)
        crosses |= differs & (gets_past & tokens & ~together).any()
    found = int(crosses.long() * 2 + differs.long())
    return "crosses" if found > 1 else "apart" if found else "same"


def _seen(mask: Tensor) -> Tensor:
    """Return True where a prepared mask shows a key, whether it is boolean or added to scores."""
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


@dataclass(frozen=True, eq=False)
class SeenImages:
    """The images that each document sees, if text attends to images by cross-attention.

    Each of `documents` (row, first column, end column) sees `images` (first, end) of the `count` of
    its row. Both are in the order of the rows.
    """

    documents: tuple[tuple[int, int, int], ...]
    images: tuple[tuple[int, int], ...]
    count: int


def images_of_documents(
    mask: Tensor,
    layout: PackedLayout,
    real: Tensor | None,
) -> SeenImages | str:
    """Return the `SeenImages` of a mask (rows, columns, images, ...), or a str: why it is unclear.

    `real` (rows, images) is False at images that only fill up a row, if the call declares it.
    """
    seen, given = _seen_images(mask), None if real is None else host_values(real)
    rows, _, count = seen.shape
    found = []
    for row in range(rows):
        taken = 0
        for document in (each for each in layout.spans if each[0] == row):
            own = np.flatnonzero(seen[row, document[1] : document[2]].any(axis=0))
            if len(own) and (own[0] != taken or own[-1] - own[0] != len(own) - 1):
                which = (
                    "shows it images that other documents see"
                    if own[0] < taken
                    else "leaves out images before it"
                )
                return (
                    f"document at column {document[1]} of row {row}: the mask {which}, or is not "
                    "in their order"
                )
            found.append((taken, taken + len(own)))
            taken += len(own)
        if given is not None and given[row, taken:].any():
            return f"row {row} has an image that no token sees, so it is not known whose it is"
    return SeenImages(layout.spans, tuple(found), count)


def _seen_images(mask: Tensor) -> np.ndarray:
    """Return True where a token sees any part of an image: (rows, columns, images)."""
    return host_values((mask != 0).flatten(3).any(dim=-1) if mask.dim() > 3 else mask != 0)
