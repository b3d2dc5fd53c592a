"""What the paper's comparisons train on, and their arms: which documents make a step, and what a
model is called with.

The documents are text of a small grammar in lengths like the paper's. It can be learned in a few
hundred steps, and other documents are of no help with it: every document has one of a few topics,
which says what may follow what, and repeats phrases of its own. So whoever sees the documents
before it in a row must first find out where it begins.

A step is a list of pieces, in the order of the rows; only `FixedLength` cuts documents. Every arm
has every token once in an epoch, and takes documents in the same random order, as far as it keeps
an order at all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import autopack
from autopack.bench.race import Batch
from autopack.bench.subjects import DISTRIBUTIONS, draw
from benchmarks import workload

IGNORED = -100
END = 0
"""The token that ends every document."""
TOPICS, SYMBOLS = 6, 48
SUCCESSORS = np.array([0.6, 0.25, 0.1, 0.05])
REPEATED, PHRASE = 0.06, 8
"""How often a phrase of the document's own begins again, and its tokens."""


@dataclass(frozen=True)
class Corpus:
    """Documents as arrays of token ids, (tokens,) int64 each: an eighth more for validation than
    for training."""

    train: list[np.ndarray]
    validation: list[np.ndarray]

    @classmethod
    def of(cls, name: str, options: argparse.Namespace) -> Corpus:
        """Return documents with the lengths of a distribution."""
        count = options.documents + max(8, options.documents // 8)
        lengths = draw(DISTRIBUTIONS[name], count, options.max_length, options.seed, options.scale)
        documents = write_grammar(lengths, options.seed)
        return cls(documents[: options.documents], documents[options.documents :])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document for training."""
        return np.array([len(document) for document in self.train])


def write_grammar(lengths: Sequence[int] | np.ndarray, seed: int) -> list[np.ndarray]:
    """Return a document of each length, its last token `END`; the same seed gives the same
    documents."""
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

    @classmethod
    def of(cls, options: argparse.Namespace) -> Shape:
        """Return the part of the options that arms choose by."""
        return cls(options.batch_size, options.max_length, options.seed)


Steps = list[list[Piece]]


def order_of(documents: int, shape: Shape) -> np.ndarray:
    """Return the order of documents in an epoch, the same for all arms."""
    return np.random.default_rng(shape.seed).permutation(documents)


def whole(lengths: np.ndarray, documents: Sequence[int] | np.ndarray) -> list[Piece]:
    """Return documents as pieces that are not cut."""
    return [Piece(int(i), 0, int(lengths[i])) for i in documents]


def mini_batches(lengths: np.ndarray, shape: Shape) -> Steps:
    """Return `batch_size` documents each, in random order."""
    return _batched(whole(lengths, order_of(len(lengths), shape)), shape.batch_size)


def grouped(lengths: np.ndarray, shape: Shape) -> Steps:
    """Return `batch_size` documents of like length each, as `group_by_length` of transformers'
    Trainer chooses them."""
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(shape.seed)
    order = get_length_grouped_indices(lengths.tolist(), shape.batch_size, generator=generator)
    return _batched(whole(lengths, order), shape.batch_size)


def fixed_length(lengths: np.ndarray, shape: Shape) -> Steps:
    """Return all documents end to end, cut every `max_length` tokens; `batch_size` such rows
    each."""
    rows: Steps = [[]]
    room = shape.max_length
    for document, _, left in whole(lengths, order_of(len(lengths), shape)):
        offset = 0
        while offset < left:
            if not room:
                rows.append([])
                room = shape.max_length
            taken = min(room, left - offset)
            rows[-1].append(Piece(document, offset, taken))
            offset, room = offset + taken, room - taken
    return [[piece for row in step for piece in row] for step in _batched(rows, shape.batch_size)]


def offline(lengths: np.ndarray, shape: Shape) -> Steps:
    """Return as many documents as `batch_size` x `max_length` tokens hold, in random order."""
    order = order_of(len(lengths), shape)
    plan = autopack.packing.plan(lengths[order], shape.batch_size * shape.max_length, "sequential")
    return [whole(lengths, order[plan[row]]) for row in range(len(plan))]


def _batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


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
    """Return rows of `max_length` tokens of which nothing says where documents begin: a call of a
    stock model."""
    tokens, size = np.concatenate(_ids(documents, pieces)), shape.max_length
    return _stacked([tokens[i : i + size] for i in range(0, len(tokens), size)])


def one_row(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """One packed row, with positions that restart: a call of an enabled model."""
    return autopack.PackingCollator()([{"input_ids": ids} for ids in _ids(documents, pieces)])


def rows(documents: Sequence[np.ndarray], pieces: list[Piece], shape: Shape) -> dict[str, Any]:
    """Packed rows of `max_length` tokens, with positions that restart: a call of an enabled
    model."""
    collate = autopack.PackingCollator(max_length=shape.max_length)
    return collate([{"input_ids": ids} for ids in _ids(documents, pieces)])


class Arm(NamedTuple):
    """A way of batching: how steps are chosen, how they are called, and whether the model is
    enabled."""

    choose: Callable[[np.ndarray, Shape], Steps]
    collate: Callable[[Sequence[np.ndarray], list[Piece], Shape], dict[str, Any]]
    enabled: bool


PADDING, FIXED, FIXED_POSID, MINI_BATCH = (
    "padding",
    "FixedLength",
    "FixedLength + PosID",
    "MiniBatch + PosID",
)
SORTED, OFFLINE = "padding, sorted", "offline rows + PosID"
ARMS = {
    PADDING: Arm(mini_batches, padded, enabled=False),
    SORTED: Arm(grouped, padded, enabled=False),
    FIXED: Arm(fixed_length, wrapped, enabled=False),
    FIXED_POSID: Arm(fixed_length, rows, enabled=True),
    OFFLINE: Arm(offline, one_row, enabled=True),
    MINI_BATCH: Arm(mini_batches, one_row, enabled=True),
}

# Models

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "hidden": 128, "heads": 4},
    "small": {"layers": 4, "hidden": 256, "heads": 4},
    "1b": {
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "vocabulary": 128256,
        "intermediate_size": 8192,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "7b": {
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "vocabulary": 32000,
        "intermediate_size": 11008,
    },
}
"""`1b` has the shape of Llama-3.2-1B, its vocabulary too, of which the documents use a few
tokens."""


def build(options: argparse.Namespace, *, enabled: bool = False) -> Any:
    """Return a random Llama; the same options give the same weights."""
    import torch

    form = {
        "seed": options.seed,
        "max_position_embeddings": options.batch_size * options.max_length,
    }
    shape = {"vocabulary": SYMBOLS + 1, **MODELS[options.model]}
    model = workload.llama(**shape, **form, dtype=getattr(torch, options.dtype)).to(options.device)
    if enabled:
        autopack.enable(model)
    return model


def targets(call: dict[str, Any]) -> int:
    """Return how many labels the loss of a call is the mean of: the first of a row is no target."""
    return int((call["labels"][:, 1:] != IGNORED).sum())
