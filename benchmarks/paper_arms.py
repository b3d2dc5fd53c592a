"""What `benchmarks.paper` trains on, and its arms: which documents make a step, and what a model is called with.

The documents are text of a small grammar in lengths like the paper's. It can be learned in a few hundred steps, and
other documents are of no help with it: every document has one of a few topics, which says what may follow what, and
repeats phrases of its own. So whoever sees the documents before it in a row must first find out where it begins.

A step is a list of pieces, in the order of the rows; only `FixedLength` cuts documents. Every arm has every token once
in an epoch, and takes documents in the same random order, as far as it keeps an order at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

import autopack
from autopack.bench.contest import Batch
from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import strategies

IGNORED = -100
END = 0
"""The token that ends every document."""
TOPICS, SYMBOLS = 6, 48
SUCCESSORS = np.array([0.6, 0.25, 0.1, 0.05])
REPEATED, PHRASE = 0.06, 8
"""How often a phrase of the document's own begins again, and its tokens."""


@dataclass(frozen=True)
class Corpus:
    """Documents as arrays of token ids, (tokens,) int64 each, and where they are from."""

    name: str
    origin: str
    train: list[np.ndarray]
    validation: list[np.ndarray]
    vocabulary: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document for training."""
        return np.array([len(document) for document in self.train])


def load(name: str, options: argparse.Namespace) -> Corpus:
    """Return the documents of a distribution."""
    count = options.documents + held_out(options.documents)
    lengths = draw(DISTRIBUTIONS[name], count, options.max_length, options.seed, options.scale)
    documents = write_grammar(lengths, options.seed)
    spread = f"lengths like {name}'s over {options.scale}: mean {lengths.mean():.0f}, deviation {lengths.std():.0f}"
    return Corpus(
        name,
        f"grammar of {TOPICS} topics, {spread}",
        documents[: options.documents],
        documents[options.documents :],
        SYMBOLS + 1,
    )


def held_out(documents: int) -> int:
    """How many documents are kept for validation."""
    return max(8, documents // 8)


def write_grammar(lengths: Sequence[int] | np.ndarray, seed: int) -> list[np.ndarray]:
    """A document of each length, its last token `END`; the same seed gives the same documents."""
    rng = np.random.default_rng([seed, 1])
    follows = np.stack([
        np.stack([rng.permutation(SYMBOLS)[: len(SUCCESSORS)] for _ in range(SYMBOLS)]) for _ in range(TOPICS)
    ])  # fmt: skip
    return [_write(follows[rng.integers(TOPICS)], int(length), rng) for length in lengths]


def _write(follows: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    chosen = rng.choice(len(SUCCESSORS), length, p=SUCCESSORS).tolist()
    again, where = rng.random(length).tolist(), rng.random(length).tolist()
    text = [int(rng.integers(SYMBOLS))]
    while len(text) < length - 1:
        at = len(text)
        if again[at] < REPEATED and at >= 2 * PHRASE:
            begin = int(where[at] * (at - PHRASE))
            text += text[begin : begin + PHRASE]
        else:
            text.append(int(follows[text[-1], chosen[at]]))
    return np.array([*(symbol + 1 for symbol in text[: length - 1]), END])


class Piece(NamedTuple):
    """Tokens of a document: `length` of them from `offset` on."""

    document: int
    offset: int
    length: int


class Shape(NamedTuple):
    """Documents of a mini-batch, the most tokens of a row, and the seed of orders."""

    batch_size: int
    max_length: int
    seed: int = 0


Steps = list[list[Piece]]
Chooser = Callable[[np.ndarray, Shape, int], Steps]
Collator = Callable[[Sequence[np.ndarray], list[Piece], Shape], dict[str, Any]]


# Which documents make a step


def order_of(documents: int, shape: Shape, epoch: int) -> np.ndarray:
    """The order of documents in an epoch, the same for all arms."""
    return np.random.default_rng([shape.seed, epoch]).permutation(documents)


def whole(lengths: np.ndarray, documents: Sequence[int] | np.ndarray) -> list[Piece]:
    """Documents as pieces that are not cut."""
    return [Piece(int(i), 0, int(lengths[i])) for i in documents]


def mini_batches(lengths: np.ndarray, shape: Shape, epoch: int) -> Steps:
    """`batch_size` documents each, in random order."""
    return _batched(whole(lengths, order_of(len(lengths), shape, epoch)), shape.batch_size)


def grouped(lengths: np.ndarray, shape: Shape, epoch: int) -> Steps:
    """`batch_size` documents of like length each, as `group_by_length` of transformers' Trainer chooses them."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    seed = int(np.random.default_rng([shape.seed, epoch]).integers(2**31))
    generator = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(lengths.tolist(), shape.batch_size, generator=generator)
    return _batched(whole(lengths, order), shape.batch_size)


def fixed_length(lengths: np.ndarray, shape: Shape, epoch: int) -> Steps:
    """All documents end to end, cut every `max_length` tokens; `batch_size` such rows each."""
    order = order_of(len(lengths), shape, epoch)
    return _planned(strategies.fixed_length(lengths[order], shape.max_length), order, shape.batch_size)


def offline(lengths: np.ndarray, shape: Shape, epoch: int) -> Steps:
    """As many documents as `batch_size` x `max_length` tokens hold, in random order."""
    order = order_of(len(lengths), shape, epoch)
    return _planned(autopack.packing.plan(lengths[order], shape.batch_size * shape.max_length, "sequential"), order, 1)


def multipack(lengths: np.ndarray, shape: Shape, epoch: int) -> Steps:
    """`batch_size` bins of at most `max_length` tokens, filled by first-fit decreasing from a random order."""
    order = order_of(len(lengths), shape, epoch)
    steps: Steps = []
    while len(order):
        most = int(np.searchsorted(np.cumsum(lengths[order]), shape.batch_size * shape.max_length, side="right"))
        least, found = 1, [[order[0]]]
        while least < most:
            tried = (least + most + 1) // 2
            bins = _first_fit(lengths, order[:tried], shape)
            least, most, found = (least, tried - 1, found) if bins is None else (tried, most, bins)
        steps.append([Piece(int(index), 0, int(lengths[index])) for each in found for index in each])
        order = order[least:]
    return steps


def _first_fit(lengths: np.ndarray, documents: np.ndarray, shape: Shape) -> list[list[int]] | None:
    """`batch_size` bins that hold these documents, the longest placed first; `None` where they do not fit."""
    bins: list[list[int]] = [[] for _ in range(shape.batch_size)]
    for index in sorted(documents.tolist(), key=lambda each: -int(lengths[each])):
        fits = (each for each in bins if int(lengths[each].sum() + lengths[index]) <= shape.max_length)
        place = next(fits, None)
        if place is None:
            return None
        place.append(index)
    return bins


def _batched(pieces: list[Piece], size: int) -> Steps:
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]


def _planned(plan: autopack.packing.Plan, order: np.ndarray, rows: int) -> Steps:
    """The steps of a plan, of so many of its rows each; its documents are those of `order`."""
    columns = zip(order[plan.documents].tolist(), plan.offsets.tolist(), plan.lengths.tolist(), strict=True)
    pieces, bounds = [Piece(*column) for column in columns], plan.bounds.tolist()
    return [pieces[bounds[row] : bounds[min(row + rows, len(plan))]] for row in range(0, len(plan), rows)]


# What the model is called with


def _ids(documents: Sequence[np.ndarray], pieces: list[Piece]) -> list[np.ndarray]:
    return [documents[i][offset : offset + length] for i, offset, length in pieces]


def _stacked(rows: list[np.ndarray]) -> dict[str, Any]:
    import torch

    return {**Batch([torch.from_numpy(row) for row in rows]).padded(END), "use_cache": False}


def padded(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """Return a document per row, padded on the right to the longest: a call of a stock model."""
    return _stacked(_ids(documents, pieces))


def wrapped(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """Return rows of `max_length` tokens of which nothing says where documents begin: a call of a stock model."""
    tokens, size = np.concatenate(_ids(documents, pieces)), shape.max_length
    return _stacked([tokens[i : i + size] for i in range(0, len(tokens), size)])


def one_row(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """One packed row, with positions that restart: a call of an enabled model."""
    return autopack.PackingCollator()([{"input_ids": ids} for ids in _ids(documents, pieces)])


def rows(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """Packed rows of `max_length` tokens, with positions that restart: a call of an enabled model."""
    collate = autopack.PackingCollator(max_length=shape.max_length)
    return collate([{"input_ids": ids} for ids in _ids(documents, pieces)])


@dataclass(frozen=True)
class Arm:
    """A way of batching: how steps are chosen, how they are called, and whether the model is enabled."""

    choose: Chooser
    collate: Collator
    enabled: bool

    def epochs(self, lengths: np.ndarray, shape: Shape) -> Iterator[list[Piece]]:
        """Steps without end, epoch by epoch."""
        for epoch in count():
            yield from self.choose(lengths, shape, epoch)


PADDING, FIXED, FIXED_POSID, MINI_BATCH = "padding", "FixedLength", "FixedLength + PosID", "MiniBatch + PosID"
SORTED, OFFLINE, MULTIPACK = "padding, sorted", "offline rows + PosID", "multipack + PosID"
ARMS = {
    PADDING: Arm(mini_batches, padded, enabled=False),
    SORTED: Arm(grouped, padded, enabled=False),
    FIXED: Arm(fixed_length, wrapped, enabled=False),
    FIXED_POSID: Arm(fixed_length, rows, enabled=True),
    OFFLINE: Arm(offline, one_row, enabled=True),
    MULTIPACK: Arm(multipack, one_row, enabled=True),
    MINI_BATCH: Arm(mini_batches, one_row, enabled=True),
}
