"""Lengths of pairs of preference data, which go through a trainer two sequences at a time.

Trainers of pairs (TRL's for DPO and rewards) make a batch (2 B, T) of them, chosen ones first. An
enabled model runs it as one packed row; the plan only has to choose which pairs share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import PAIRS, check_int
from autopack.packing.lengths import to_numpy

FORMS = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)
"""Columns of tokenized pairs: a prompt that both sequences begin with, or whole sequences."""
BLOCK = 10_000
"""Pairs that are read at a time."""


def pair_lengths(dataset: Any, collator: Callable[[list[Any]], Any], *, max_length: int | None = None) -> np.ndarray:
    """Return tokens of both sequences of each pair, (pairs, 2) int64: the chosen one and the
    rejected one.

    For `PackedBatchSampler`, which then makes batches of pairs by their tokens, and counts the
    squares of a cost by sequence. Lengths are those after `collator`: the columns of the data set
    give the numbers of tokens, and the collator is called with the longest pairs, one at a time, to
    check that it makes as many of them.

    Args:
        dataset: tokenized pairs, as TRL's trainers hold them once they are made
            (`trainer.train_dataset`): a `datasets.Dataset`, or anything with a length and examples
            that are mappings. Its columns are `prompt_ids`, `chosen_ids` and `rejected_ids` (DPO),
            `chosen_ids` and `rejected_ids` (rewards), or `chosen_input_ids` and
            `rejected_input_ids` (ORPO, CPO).
        collator: makes batches of them (`trainer.data_collator`).
        max_length: tokens at which the collator cuts each sequence, if it has no attribute
            `max_length` with this number.

    Raises `InvalidPacking` for data without these columns (text, packed rows), without a length,
    with sequences that hold no token, and if the collator makes other lengths of a pair;
    `ValueError` for a `max_length` below 1.
    """
    check_int("max_length", max_length, 1, optional=True)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, (Mapping, str)):
        found = f"found {type(dataset).__name__}"
        raise InvalidPacking(f"wanted a data set with a length, {found}; of a stream, take what fits into memory")
    if not len(dataset):
        raise InvalidPacking("wanted at least one pair, found an empty data set")
    form = _form(dataset)
    sizes = _sizes(dataset, form)  # (pairs, columns)
    made = sizes[:, -2:] + (sizes[:, :1] if len(form) == 3 else 0)
    cut = getattr(collator, "max_length", None) if max_length is None else max_length
    made = made if cut is None else np.minimum(made, cut)
    if not made.all():
        index, which = (int(of[0]) for of in np.nonzero(made == 0))
        raise InvalidPacking(f"pair {index}: found no tokens in {form[which - 2]!r}; leave such pairs out")
    longest = {0, *np.argmax(made, axis=0).tolist(), *np.argmax(sizes, axis=0).tolist()}
    for index in sorted(longest):
        collated = [len(tokens) for tokens in _sequences(dataset, index, collator)] or None
        if collated != made[index].tolist():
            wanted = f"{form} and max_length={cut} say {made[index].tolist()}"
            raise InvalidPacking(
                f"pair {index}: {_name(collator)} makes sequences of {collated} tokens of it, and {wanted}. Pass the "
                f"collator and the data set of the trainer, and max_length= if it cuts at a length that it does not say"
            )
    return made


def pair_prefixes(dataset: Any, collator: Callable[[list[Any]], Any], *, max_length: int | None = None) -> np.ndarray:
    """Return the common beginning of each pair's sequences, (pairs,) int64 tokens: the prompt, or
    more.

    For `PackedBatchSampler(pair_lengths(...), prefixes=pair_prefixes(...))`, whose rows have room
    for the pairs of a model that computes a prompt once for both
    (`autopack.enable(model, share=...)`). Arguments and errors are those of `pair_lengths`; a
    collator that leaves the prompt out, or cuts off its beginning, is an error too.
    """
    lengths = pair_lengths(dataset, collator, max_length=max_length)
    form = _form(dataset)
    if len(form) == 3:
        prompts = _sizes(dataset, form)[:, 0]
    else:
        pairs = ([dataset[index][name] for name in form] for index in range(len(dataset)))
        prompts = np.array([_in_common(*pair) for pair in pairs], np.int64)
    found = np.minimum(prompts, lengths.min(axis=1))
    for index in {0, int(found.argmax()), int(lengths.sum(axis=1).argmax())}:
        sequences = _sequences(dataset, index, collator)
        common = _in_common(*sequences) if len(sequences) == 2 else 0
        if common < found[index]:
            raise InvalidPacking(
                f"pair {index}: {_name(collator)} makes sequences of it that begin with {common} tokens in common, and "
                f"{form} say {found[index]}. Pass the collator and the data set of the trainer, and leave prefixes out "
                f"where it cuts off the beginning of a prompt"
            )
    return found


def _in_common(one: Any, other: Any) -> int:
    """Return the number of tokens that two sequences begin with in common."""
    shorter = min(len(one), len(other))
    differs = np.asarray(one)[:shorter] != np.asarray(other)[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _form(dataset: Any) -> tuple[str, ...]:
    """Return the columns of tokenized pairs that a data set has."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = list(dataset[0]) if isinstance(dataset[0], Mapping) else []
    form = next((form for form in FORMS if {*form} <= {*names}), None)
    if form is not None:
        return form
    wanted = "wanted tokenized pairs (columns chosen_ids and rejected_ids)"
    if {*names} & {"image", "images"}:
        way = "those with images are tokenized batch by batch, and have no lengths before"
    elif {*names} & {name for pair in PAIRS for name in pair}:
        way = "make the trainer first and pass its train_dataset, which it has tokenized"
    else:
        way = "these are no pairs"
    raise InvalidPacking(f"{wanted}, found {sorted(map(str, names))}; {way}")


def _sizes(dataset: Any, form: Sequence[str]) -> np.ndarray:
    """Return the number of tokens of each example in these columns, (examples, columns) int64."""
    makes_examples = dict(getattr(dataset, "format", None) or {}).get("type") == "custom"  # when they are read
    if hasattr(dataset, "with_format") and hasattr(dataset, "select_columns") and not makes_examples:
        import pyarrow as pa
        import pyarrow.compute as pc

        tables = dataset.select_columns(list(form)).with_format("arrow").iter(batch_size=BLOCK)
        try:
            found = [[pc.list_value_length(table.column(name)).to_numpy() for name in form] for table in tables]
        except pa.ArrowException as error:
            raise InvalidPacking(f"columns {form}: wanted a list of tokens per pair; {error}") from error
        sizes = np.concatenate([np.stack(part, axis=1) for part in found])
        if np.isnan(sizes).any():
            index = int(np.isnan(sizes).any(axis=1).argmax())
            raise InvalidPacking(f"pair {index}: found no value in one of {form}; leave such pairs out")
        return sizes.astype(np.int64)
    examples = (dataset[index] for index in range(len(dataset)))
    return np.array([[len(example[name]) for name in form] for example in examples], np.int64)


def _sequences(dataset: Any, index: int, collator: Callable[[list[Any]], Any]) -> list[np.ndarray]:
    """Return the tokens of the sequences that a collator makes of this pair alone; [] if
    unclear."""
    try:
        batch = collator([dict(dataset[index])])
    except Exception as error:
        raise InvalidPacking(
            f"pair {index}: {_name(collator)} makes no batch of it ({type(error).__name__}: {error}). Pass that of a "
            f"trainer of pairs, trainer.data_collator"
        ) from error
    found: list[np.ndarray] = []
    for which in ("", "chosen_", "rejected_"):
        ids, mask = f"{which}input_ids", f"{which}attention_mask"
        if isinstance(batch, Mapping) and ids in batch and mask in batch:
            rows = zip(to_numpy(batch[ids]), to_numpy(batch[mask]), strict=True)
            found += [np.asarray(row)[np.asarray(real).astype(bool)] for row, real in rows]
    return found


def _name(collator: Any) -> str:
    return getattr(collator, "__name__", type(collator).__name__)
