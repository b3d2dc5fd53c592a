"""The same tokens in two batches of rows and columns: out of the one into the other, and back.

A padded batch becomes one packed row of its tokens, rows that begin alike a row that holds common
tokens once, and documents of packed rows become rows of a batch. Whoever needs one of these builds
it here: plans of calls, mixers, attention of a model's own, heads, functions that number tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopack.layout.forms import Frame
from autopack.layout.host import upload
from autopack.layout.packed import PackedLayout, real_documents

GROWTH = 1.5
"""Largest ratio of lengths in one bucket: at most a third is padding, and buckets are few."""

Spread = Callable[[Tensor], Tensor]
"""Function from (rows, columns, ...) to the (documents, tokens, ...) that a module runs on."""
Grouping = Callable[[PackedLayout], list[np.ndarray]]
"""Function that groups documents, by number, into batches."""
Run = Callable[[Spread], Any]
"""Function that runs a module on (documents, tokens, ...), as the given `Spread` makes them."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Map of tokens from one batch of rows and columns into another batch, and back.

    * `places` holds, for each place of the first batch, the place of its token in the other one; -1
      if the other one leaves it out. Several tokens may share a place.
    * `sources` holds, for each place of the other batch, the place of the first that it is filled
      from. At padding that is some token: it is finite, and what is made of it is dropped.

    Places count along flattened rows; both arrays have the shape of their batch.
    """

    places: np.ndarray
    sources: np.ndarray
    device: torch.device

    @classmethod
    def of_real(
        cls, real: np.ndarray, device: torch.device, columns: np.ndarray | None = None
    ) -> TokenMap:
        """Return the map of a batch's real tokens, True in (rows, columns), into one row.

        Padding may lie on the right, on the left, or between tokens (holes). `columns` are the
        columns of the tokens in that row, in their order, if several share one.
        """
        tokens = np.flatnonzero(real)
        columns = np.arange(len(tokens)) if columns is None else columns
        sources = np.empty((1, columns.max(initial=-1) + 1), dtype=np.int64)
        sources[0, columns[::-1]] = tokens[::-1]  # the first of those that share one
        return cls(_inverse(real.shape, tokens, columns), sources, device)

    @classmethod
    def of_documents(cls, layout: PackedLayout, documents: np.ndarray | None = None) -> TokenMap:
        """Return the map of documents of packed rows into right-padded rows of a batch.

        Without `documents`, all documents but runs of padding are mapped.
        """
        if documents is None:
            real = np.flatnonzero(real_documents(layout))
            return layout.derived("documents as rows", lambda: cls.of_documents(layout, real))
        lengths = layout.sizes[documents]
        columns = np.arange(lengths.max())
        sources = layout.bounds[documents][:, None] + np.minimum(columns, lengths[:, None] - 1)
        real = columns < lengths[:, None]
        places = _inverse((layout.rows, layout.columns), sources[real], np.flatnonzero(real))
        return cls(places, sources, layout.device)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the first batch, which values come from."""
        return self.places.shape[0], self.places.shape[1]

    @property
    def into(self) -> tuple[int, int]:
        """Rows and columns of the other batch, which values are gathered into."""
        return self.sources.shape[0], self.sources.shape[1]

    @cached_property
    def real(self) -> np.ndarray:
        """Mask of the first batch (rows, columns), True at tokens that the other batch has."""
        return self.places >= 0

    @cached_property
    def filled(self) -> np.ndarray:
        """Mask of the other batch (rows, columns), True at its tokens, False at its padding."""
        return self.places.reshape(-1)[self.sources] == np.arange(self.sources.size).reshape(
            self.into
        )

    @cached_property
    def is_padded(self) -> bool:
        """True if the other batch holds padding."""
        return not self.filled.all()

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the other batch."""
        return int(self.filled.sum())

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row of the other batch."""
        return self.filled.sum(axis=1)

    @property
    def starts(self) -> np.ndarray:
        """Place, in the first batch, of the first token of each row of the other one."""
        return self.sources[:, 0]

    @cached_property
    def mask(self) -> Tensor:
        """`filled` as a tensor on the device."""
        return upload(self.filled, self.device)

    @cached_property
    def where(self) -> Tensor:
        """`sources` as a tensor on the device."""
        return upload(self.sources, self.device)

    @cached_property
    def on_the_right(self) -> bool:
        """True if every row of the first batch has its tokens first, and then padding."""
        return bool((self.real[:, :-1] >= self.real[:, 1:]).all())

    @cached_property
    def has_holes(self) -> bool:
        """True if padding lies between tokens of a row of the first batch."""
        return len(self.unpredicted) > self.shape[0]

    @cached_property
    def unpredicted(self) -> np.ndarray:
        """Numbers of the real tokens without a real token right before them in the first batch."""
        return np.flatnonzero(
            np.pad(~self.real[:, :-1], ((0, 0), (1, 0)), constant_values=True)[self.real]
        )

    def gather(self, value: Tensor, axis: int = 1) -> Tensor:
        """Return a value of the first batch, (rows, columns, ...), in the form of the other batch.

        Differentiable. The columns lie at `axis`, behind the rows. With 0 the value is flat,
        (rows * columns, ...), and so is the result.
        """
        along = max(axis - 1, 0)
        flat = value.flatten(along, along + 1) if axis else value
        found = flat.index_select(along, self.where.reshape(-1).to(value.device))
        return found.unflatten(along, self.into) if axis else found

    def restore(self, value: Tensor, axis: int = 1, fill: bool = False) -> Tensor:
        """Return a value of the other batch in the form of the first, zero at tokens it leaves out.

        Differentiable. With `fill`, the value of the first token stands there instead of zero.
        """
        along = max(axis - 1, 0)
        tokens = value.flatten(along, along + 1) if axis else value
        found = tokens.index_select(along, self.back.to(value.device))
        if not (fill or self.real.all()):
            # In place, on what is new here: another tensor of this size would be made.
            found = found.index_fill_(along, upload(np.flatnonzero(~self.real), value.device), 0)
        return found.unflatten(along, self.shape) if axis else found

    def holds(self, part: Any) -> bool:
        """Return True if a part of an output has a value for every place of the other batch."""
        return isinstance(part, Tensor) and part.shape[:2] == self.into

    @cached_property
    def back(self) -> Tensor:
        """The flat `places` on the device; -1 is replaced by the place of the first token."""
        return upload(self.places.reshape(-1).clip(0), self.device)


def _inverse(shape: tuple[int, ...], sources: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return an array of a shape with `places` at flat indices `sources`, and -1 elsewhere."""
    found = np.full(shape, -1)
    found.reshape(-1)[sources] = places
    return found


def by_length(lengths: np.ndarray) -> list[np.ndarray]:
    """Return the numbers of the documents of each length, one array per length, shortest first."""
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def in_order(parts: list[Any], groups: list[np.ndarray]) -> Tensor | None:
    """Return groups' results (documents, ...) as one tensor, by document; None if shapes differ.

    None too if a part is no tensor, or not one result per document of its group.
    """
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim()]
    if [*map(len, tensors)] != [*map(len, groups)] or len({part.shape[1:] for part in tensors}) > 1:
        return None
    order = np.argsort(np.concatenate(groups), kind="stable")
    return torch.cat(tensors).index_select(0, upload(order, tensors[0].device))


def equally_long(layout: PackedLayout) -> list[np.ndarray]:
    """Return the numbers of a layout's documents grouped by length, the shortest first."""
    return by_length(layout.sizes)


def equally_long_documents(layout: PackedLayout) -> list[np.ndarray]:
    """Return `equally_long` without runs of padding; with them if there is nothing else."""
    real, lengths = np.flatnonzero(real_documents(layout)), layout.sizes
    return [real[group] for group in by_length(lengths[real])] if len(real) else by_length(lengths)


def each_by_itself(layout: PackedLayout) -> list[np.ndarray]:
    """Return the numbers of the documents, one array of one number each."""
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
    """Maps of packed rows' documents into several batches, and of results back into the rows."""

    shape: tuple[int, int]
    maps: list[TokenMap]
    back: Tensor
    """Place of every token of the flattened rows among the places of all batches, end to end.

    Tokens that no batch has get the place behind the last.
    """

    @classmethod
    def of(cls, layout: PackedLayout, groups: list[np.ndarray]) -> Batches:
        """Return one batch per group of documents; tokens in no group get zeros back."""
        maps = [TokenMap.of_documents(layout, documents) for documents in groups]
        ends = np.cumsum([each.sources.size for each in maps])
        back = np.full((layout.rows, layout.columns), ends[-1])
        for each, end in zip(maps, ends, strict=True):
            back[each.real] = each.places[each.real] + end - each.sources.size
        return cls(back.shape, maps, layout.upload(back.reshape(-1)))

    @classmethod
    def grouped(cls, layout: PackedLayout, grouping: Grouping | None = None) -> Batches:
        """Return the `Batches` by `grouping`, by default in `buckets`; made once per layout."""
        grouping = grouping or buckets
        return layout.derived(("batches", grouping), lambda: cls.of(layout, grouping(layout)))

    def together(
        self,
        outputs: list[Any],
        otherwise: Callable[[list[Any]], Any] = lambda parts: parts[-1],
    ) -> Any:
        """Return a module's outputs for all batches, put together to one for packed rows.

        Dictionaries, outputs of transformers, tuples and lists are put together part by part. A
        part without a value for every token becomes the result of `otherwise`: by default, the part
        of the last batch.
        """

        def joined(*parts: Any) -> Any:
            """Return one part of all batches as (rows, columns, ...), or `otherwise` of it."""
            if not all(each.holds(part) for each, part in zip(self.maps, parts, strict=True)):
                return otherwise(list(parts))
            flat = [part.flatten(0, 1) for part in parts]
            flat.append(flat[0].new_zeros(1, *flat[0].shape[1:]))  # for tokens that no batch has
            return torch.cat(flat).index_select(0, self.back).unflatten(0, self.shape)

        return each_part(joined, *outputs)


def each_part(change: Callable[..., Any], *outputs: Any) -> Any:
    """Return `change` of the matching parts of outputs of one form, in that form.

    A form is made of dictionaries, tuples and lists.
    """
    first = outputs[0]
    if isinstance(first, dict):
        return type(first)(
            **{name: each_part(change, *(output[name] for output in outputs)) for name in first},
        )
    if isinstance(first, tuple | list):
        return type(first)(each_part(change, *parts) for parts in zip(*outputs, strict=True))
    return change(*outputs)


def spread_tokens(value: Any, shape: tuple[int, int], spread: Spread) -> Any:
    """Return `spread` of an argument per token, (rows or 1, columns, ...); others unchanged."""
    if isinstance(value, tuple):
        return tuple(spread_tokens(part, shape, spread) for part in value)
    return Frame(*shape, shared=True).changed("", value, spread)


def mean_loss(losses: list[Tensor | None], counts: list[int], device: torch.device) -> Tensor:
    """Return the mean over all terms of losses that are means of `counts` terms each.

    None may stand for a loss without terms. Without any term the result is NaN, as a mean over
    nothing is.
    """
    known = [
        (loss, count)
        for loss, count in zip(losses, counts, strict=True)
        if loss is not None and count
    ]
    total = sum(count for _, count in known)
    shares = [loss * (count / total) for loss, count in known]
    return torch.stack(shares).sum() if shares else torch.full((), torch.nan, device=device)


def items_of_share(arguments: Mapping[str, Any], count: int, total: int) -> dict[str, Any]:
    """Return {"num_items_in_batch": the given number * `count` / `total`}, {} if either is missing.

    `count` of `total` labels belong to this share. Some losses divide a sum by the number and
    others ignore it; in both cases `mean_loss` of all shares is the loss of the whole.
    """
    items = arguments.get("num_items_in_batch")
    return {"num_items_in_batch": items * (count / total)} if items is not None and count else {}
