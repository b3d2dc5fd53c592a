"""Documents of packed rows as rows of a batch, right-padded or of one length, and back.

Everything that runs documents apart builds its batches here: mixers, attention of a model's own,
heads with one result per row, functions that number tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from autopack.errors import UnsupportedModel
from autopack.layout.forms import FIELDS, Field, Frame, rows_first
from autopack.layout.packed import PackedLayout, real_documents

GROWTH = 1.5
"""Largest ratio of lengths in one bucket: at most a third is padding, and buckets are few."""

Spread = Callable[[torch.Tensor], torch.Tensor]
"""Function from (rows, columns, ...) to the (documents, tokens, ...) that a module runs on."""
Grouping = Callable[[PackedLayout], list[np.ndarray]]
"""Function that groups documents, by number, into batches."""
Run = Callable[[Spread], Any]
"""Function that runs a module on (documents, tokens, ...), as the given `Spread` makes them."""


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """Some documents of packed rows, or their first tokens, as right-padded rows of a batch.

    `documents` are their numbers in the layout, in the order of the batch. `lengths` are the tokens
    of each that the batch holds. `tokens` are the tokens of the flattened rows at the places of the
    batch that are not padding, in order. `where` is the token of the flattened rows at each place,
    int64 (documents, longest). `kept` are the places of the flattened batch that are not padding,
    in order; None if it has no padding.
    """

    layout: PackedLayout
    documents: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    where: torch.Tensor
    kept: torch.Tensor | None

    @classmethod
    def of(cls, layout: PackedLayout, documents: np.ndarray, longest: int | None = None) -> DocumentBatch:
        """Return the batch of these documents, or of the first `longest` tokens of each."""
        lengths = np.minimum(np.diff(layout.bounds)[documents], longest or layout.columns)
        columns = np.arange(lengths.max())
        # Padding repeats the last token: it is finite, and what is made of it is dropped.
        where = layout.bounds[documents][:, None] + np.minimum(columns, lengths[:, None] - 1)
        real = np.flatnonzero(columns < lengths[:, None])
        kept = None if len(real) == where.size else layout.upload(real)
        return cls(layout, documents, lengths, where.reshape(-1)[real], layout.upload(where), kept)

    @classmethod
    def without_padding(cls, layout: PackedLayout) -> DocumentBatch:
        """Return the batch of all documents in order, but runs of padding; made once per layout."""
        return layout.derived("documents as rows", lambda: cls.of(layout, np.flatnonzero(real_documents(layout))))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of documents, and length of the longest in tokens."""
        return self.where.shape[0], self.where.shape[1]

    @property
    def starts(self) -> np.ndarray:
        """First token of each document in the flattened rows."""
        return self.layout.bounds[self.documents]

    @property
    def is_padded(self) -> bool:
        """True if the documents differ in length."""
        return self.kept is not None

    @cached_property
    def mask(self) -> torch.Tensor:
        """True at tokens, False at padding: bool (documents, longest)."""
        return self.layout.upload(np.arange(self.shape[1]) < self.lengths[:, None])

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (rows, columns, ...) as (documents, longest, ...), with last tokens repeated.
        Differentiable."""
        return tensor.reshape(-1, *tensor.shape[2:])[self.where.to(tensor.device)]

    def square(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the part of a mask or bias (rows or 1, ..., columns or 1, columns) for each
        document, unpadded.

        The result is (documents, ..., tokens or 1, tokens). Some releases make masks for one key
        too many.

        Raises:
            UnsupportedModel: The mask is not for these rows but, for example, for the padded batch.
        """
        rows, columns = self.layout.rows, self.layout.columns
        queries = columns if mask.dim() == 2 or mask.shape[-2] == 1 else mask.shape[-2]
        known = (columns, columns + 1)
        if len(mask) not in (1, rows) or queries not in known or mask.shape[-1] not in known:
            raise UnsupportedModel(
                f"attention got a mask of the shape {tuple(mask.shape)} for {rows} packed rows of {columns} columns, "
                f"so what of it belongs to a document cannot be told. Run the documents one per row."
            )
        column = self.where % self.layout.columns
        row = self.where[:, 0] // self.layout.columns
        row = row if len(mask) > 1 else row * 0
        if mask.dim() < 3 or mask.shape[-2] == 1 or mask.requires_grad:
            return gather_pairs(mask[row], column, column)
        # What belongs to the documents alone is read, where that above copies whole rows for each of them.
        between = [slice(None)] * (mask.dim() - 3)
        places: Any = (row[:, None, None], *between, column[:, :, None], column[:, None])
        return mask[places].movedim((1, 2), (-2, -1))

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output (documents, longest, ...) without padding: (tokens, ...)."""
        flat = tensor.reshape(-1, *tensor.shape[2:])
        return flat if self.kept is None else flat.index_select(0, self.kept.to(flat.device))

    def holds(self, part: Any) -> bool:
        """Return True if a part of an output has a value for every token."""
        return isinstance(part, torch.Tensor) and part.shape[:2] == self.where.shape


def gather_pairs(parts: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return columns `queries` and `keys` of (documents, ..., columns or 1, columns), per
    document."""

    def along(axis: int, columns: torch.Tensor) -> torch.Tensor:
        between = (1,) * (parts.dim() + axis - 1)
        return torch.take_along_dim(parts, columns.reshape(len(columns), *between, -1, *(1,) * (-1 - axis)), axis)

    parts = along(-1, keys)
    return parts if parts.dim() == 2 or parts.shape[-2] == 1 else along(-2, queries)


def by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the numbers of the documents of each length, the shortest first: without padding."""
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def in_order(parts: list[torch.Tensor], groups: list[np.ndarray]) -> torch.Tensor:
    """Return results of groups, (documents of the group, ...) each, in the order of the
    documents."""
    order = torch.from_numpy(np.argsort(np.concatenate(groups), kind="stable"))
    return torch.cat(parts).index_select(0, order.to(parts[0].device))


def equally_long(layout: PackedLayout) -> list[np.ndarray]:
    """Return `by_length` of the documents of a layout."""
    return by_length(np.diff(layout.bounds))


def equally_long_documents(layout: PackedLayout) -> list[np.ndarray]:
    """Return `equally_long` without runs of padding, unless nothing else is there."""
    real, lengths = np.flatnonzero(real_documents(layout)), np.diff(layout.bounds)
    return [real[group] for group in by_length(lengths[real])] if len(real) else by_length(lengths)


def each_by_itself(layout: PackedLayout) -> list[np.ndarray]:
    """Return the numbers of the documents, one per group."""
    return np.split(np.arange(len(layout.lengths)), len(layout.lengths))


def buckets(layout: PackedLayout) -> list[np.ndarray]:
    """Return the numbers of the documents of each bucket, the shortest first.

    Lengths in a bucket are within a factor of `GROWTH`.
    """
    lengths = np.asarray(layout.lengths)
    rest = np.argsort(lengths, kind="stable")
    found: list[np.ndarray] = []
    while len(rest):
        count = np.searchsorted(lengths[rest], lengths[rest[0]] * GROWTH, side="right")
        found.append(rest[:count])
        rest = rest[count:]
    return found


@dataclass(frozen=True, eq=False)
class Batches:
    """Documents of a layout in several batches, whose results it puts back into packed rows."""

    layout: PackedLayout
    batches: list[DocumentBatch]
    back: torch.Tensor
    """Place of every token of the flattened rows among the kept tokens of all batches, end to end.

    Tokens that no batch has get the place behind the last.
    """
    complete: bool = True
    """True if every token is in some batch."""

    @classmethod
    def of(cls, layout: PackedLayout, groups: list[np.ndarray]) -> Batches:
        """Return one batch per group of documents; tokens of documents in no group get zeros."""
        batches = [DocumentBatch.of(layout, documents) for documents in groups]
        tokens = np.concatenate([batch.tokens for batch in batches])
        back = np.full(layout.bounds[-1], len(tokens))
        back[tokens] = np.arange(len(tokens))
        return cls(layout, batches, layout.upload(back), len(tokens) == len(back))

    @classmethod
    def grouped(cls, layout: PackedLayout, grouping: Grouping | None = None) -> Batches:
        """Return batches by `grouping`, or in buckets of similar length; made once per layout."""
        grouping = grouping or buckets
        return layout.derived(("batches", grouping), lambda: cls.of(layout, grouping(layout)))

    def together(
        self, outputs: list[Any], otherwise: Callable[[list[Any]], Any] = lambda parts: parts[-1], name: str = ""
    ) -> Any:
        """Return a module's outputs for all batches as an output for packed rows.

        Dictionaries, outputs of transformers, tuples and lists are put together part by part. A
        part without a value for every token becomes the result of `otherwise`: by default, the part
        of the last batch. `name` is the name of the output if it is a part of one.
        """
        first = outputs[0]
        if isinstance(first, dict):
            return type(first)(**{key: self.together([out[key] for out in outputs], otherwise, key) for key in first})
        if isinstance(first, (tuple, list)):
            return type(first)(self.together(list(parts), otherwise, name) for parts in zip(*outputs, strict=True))
        axis = FIELDS.get(name, Field(())).rows + 1
        pairs = [(batch, rows_first(part, axis)) for batch, part in zip(self.batches, outputs, strict=True)]
        if not all(batch.holds(part) for batch, part in pairs):
            return otherwise(outputs)
        parts = [batch.real(part) for batch, part in pairs]
        if not self.complete:
            parts.append(parts[0].new_zeros(1, *parts[0].shape[1:]))
        whole = torch.cat(parts).index_select(0, self.back)
        whole = whole.reshape(self.layout.rows, self.layout.columns, *whole.shape[1:])
        return whole.movedim((0, 1), (axis - 1, axis)) if axis > 1 else whole


def spread_tokens(value: Any, layout: PackedLayout, spread: Spread) -> Any:
    """Return an argument spread if it has a value per token, (rows or 1, columns, ...); else
    unchanged."""
    if isinstance(value, tuple):
        return tuple(spread_tokens(part, layout, spread) for part in value)
    return Frame(layout.rows, layout.columns, shared=True).changed("", value, spread)


def mean_loss(losses: list[torch.Tensor | None], counts: list[int], device: torch.device) -> torch.Tensor:
    """Return the mean over all terms of losses that are means of `counts` terms each.

    None may stand for a loss without terms. Without any term the result is NaN, as a mean over
    nothing is.
    """
    known = [(loss, count) for loss, count in zip(losses, counts, strict=True) if loss is not None and count]
    total = sum(count for _, count in known)
    shares = [loss * (count / total) for loss, count in known]
    return torch.stack(shares).sum() if shares else torch.full((), torch.nan, device=device)


def items_of_share(arguments: Mapping[str, Any], count: int, total: int) -> dict[str, Any]:
    """Return the `num_items_in_batch` for a call with `count` of `total` labels; nothing if it has
    none.

    It is that share of the number given. Some losses divide a sum by it and others ignore it; in
    both cases `mean_loss` of all shares is the loss of the whole.
    """
    items = arguments.get("num_items_in_batch")
    return {"num_items_in_batch": items * (count / total)} if items is not None and count else {}
