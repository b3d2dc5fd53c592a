"""Which images of its row each document sees, where text attends to images across.

A mask of tokens and images says so: processors write one, along whose diagonal the documents of a packed row lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout


@dataclass(frozen=True, eq=False)
class SeenImages:
    """The images of each document: `images` of `count` in a row, from the first to the end, for each of `documents`.

    Both are in the order of the rows; a document is given by its row, first column and end column.
    """

    documents: tuple[tuple[int, int, int], ...]
    images: tuple[tuple[int, int], ...]
    count: int


def of_documents(mask: torch.Tensor, layout: PackedLayout, real: torch.Tensor | None) -> SeenImages | str:
    """The images that documents of packed rows see by a mask (rows, columns, images, ...); or why none can be told.

    `real` (rows, images) says which images are none of those that fill up a row, where a call says that.
    """
    seen, given = _seen(mask), None if real is None else host_values(real)
    rows, _, count = seen.shape
    found = []
    for row in range(rows):
        taken = 0
        for document in (each for each in layout.spans if each[0] == row):
            own = np.flatnonzero(seen[row, document[1] : document[2]].any(axis=0))
            if len(own) and (own[0] != taken or own[-1] - own[0] != len(own) - 1):
                which = "shows it images that other documents see" if own[0] < taken else "leaves out images before it"
                return f"document at column {document[1]} of row {row}: the mask {which}, or is not in their order"
            found.append((taken, taken + len(own)))
            taken += len(own)
        if given is not None and given[row, taken:].any():
            return f"row {row} has an image that no token sees, so it is not known whose it is"
    return SeenImages(layout.spans, tuple(found), count)


def of_rows(mask: torch.Tensor, real: torch.Tensor | None) -> SeenImages:
    """The images of rows of one document each: all but those that fill up the row, by `real` or as no token sees."""
    shown = np.asarray(_seen(mask).any(axis=1))
    rows, count = shown.shape
    if real is not None:
        shown = shown | host_values(real)
    ends = np.where(shown.any(axis=1), count - np.argmax(shown[:, ::-1], axis=1), 0)
    documents = tuple((row, 0, mask.shape[1]) for row in range(rows))
    return SeenImages(documents, tuple((0, int(end)) for end in ends), count)


def _seen(mask: torch.Tensor) -> np.ndarray:
    """Whether a token sees any of an image: (rows, columns, images)."""
    return host_values((mask != 0).flatten(3).any(dim=-1) if mask.dim() > 3 else mask != 0)
