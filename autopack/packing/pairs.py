"""Lengths of pairs of preference data, which go through a trainer two sequences at a time.

Trainers of pairs (TRL's for DPO and rewards) make a batch (2 B, T) of them, chosen ones first. An
enabled model runs it as one packed row; the plan only has to choose which pairs share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.layout import common_beginning
from autopack.packing.checks import no_examples, unusable
from autopack.packing.lengths import to_numpy

BLOCK = 64
"""Pairs that are collated at a time."""


def pair_lengths(
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    shared: bool = False,
) -> np.ndarray:
    """Return tokens of each pair, (pairs,) int64: of the chosen sequence and the rejected one.

    For `PackedBatchSampler`, which then makes batches of pairs by their tokens. All pairs are
    collated once: lengths are those of the sequences that `collator` makes, cut where it cuts them.

    Args:
        dataset: tokenized pairs, as TRL's trainers hold them once they are made
            (`trainer.train_dataset`): a `datasets.Dataset`, or anything with a length and examples
            that are mappings.
        collator: makes batches of them (`trainer.data_collator`): `input_ids` and `attention_mask`
            of all chosen sequences and then of all rejected ones, or both with `chosen_` and
            `rejected_` before their names.
        shared: `True` counts what both sequences of a pair begin with, the prompt or more, once: a
            model computes it once (`autopack.enable(model, share=...)`).

    Raises `InvalidPacking` for data without a length, sequences that hold no token, and a collator
    that makes no such batches of it, as of text, which the trainer tokenizes.
    """
    found = []
    for index, pair in enumerate(_sequences(dataset, collator)):
        for name, tokens in zip(("chosen", "rejected"), pair, strict=True):
            if not len(tokens):
                raise unusable(
                    f"pair {index}: found no tokens in its {name} sequence; leave such pairs out",
                )
        found.append(sum(map(len, pair)) - (common_beginning(*pair) if shared else 0))
    return np.array(found, np.int64)


def _sequences(dataset: Any, collator: Callable[[list[Any]], Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of both sequences that a collator makes of each pair."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, (Mapping, str)):
        raise no_examples(
            f"wanted a data set with a length, found {type(dataset).__name__}; of a stream, take what fits into memory"
        )
    if not len(dataset):
        raise no_examples("wanted at least one pair, found an empty data set")
    name = getattr(collator, "__name__", type(collator).__name__)
    way = "Pass what a trainer of pairs has once it is made: its train_dataset, tokenized, and its data_collator"
    for first in range(0, len(dataset), BLOCK):
        examples = [dict(dataset[index]) for index in range(first, min(first + BLOCK, len(dataset)))]
        where = f"pairs {first} to {first + len(examples) - 1}: {name} makes"
        try:
            batch = collator(examples)
        except Exception as error:
            message = f"{where} no batch of them ({type(error).__name__}: {error}). {way}"
            raise InvalidPacking(message, code="pair-sequences") from error
        found_rows: list[np.ndarray] = []
        for which in ("", "chosen_", "rejected_"):
            ids, mask = f"{which}input_ids", f"{which}attention_mask"
            if isinstance(batch, Mapping) and ids in batch and mask in batch:
                rows = zip(to_numpy(batch[ids]), to_numpy(batch[mask]), strict=True)
                found_rows += [np.asarray(row)[np.asarray(real).astype(bool)] for row, real in rows]
        if len(found_rows) != 2 * len(examples):
            message = f"{where} {len(found_rows)} sequences of {len(examples)} pairs, wanted two of each. {way}"
            raise InvalidPacking(message, code="pair-sequences")
        yield from zip(found_rows[: len(examples)], found_rows[len(examples) :], strict=True)
