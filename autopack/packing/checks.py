"""Columns that packing interprets: their names, weights of tokens, and errors about values and
options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np

from autopack.errors import InvalidPacking
from autopack.layout import COMPLETION_KEYS, IGNORED_LABEL, LABEL_KEYS

IDS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LENGTHS = "seq_lengths"
"""Column of packed rows with the number of tokens of each document."""
LOSS_WEIGHTS = "loss_weights"
"""Weights per token, (B, T) float32."""
DOCUMENT_WEIGHT = "document_weight"
"""Weight of a document: a float in an example, a list of them in a packed row."""
PAIRS = (
    ("chosen", "rejected"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)
"""Two columns that together make an example a pair: text, and tokens by the names of TRL."""
LONGEST = (1 << 31) - 1
"""Most tokens of a document or row: the sum of the squared lengths of a row then fits into 63
bits, and its bounds into 32."""
FROM_0 = ("seed", "first_position", "epoch", "step", "rank", "shard")
"""Options that begin to count at 0."""
Weighing = Literal["document", "token"]


unusable = partial(InvalidPacking, code="unusable-data")
"""The error about data that cannot be packed."""
no_examples = partial(InvalidPacking, code="no-examples")
"""The error about data that are no examples."""
wrong_numbers = partial(InvalidPacking, code="numbers-per-document")
"""The error about numbers that do not fit the documents."""
other_data = partial(InvalidPacking, code="other-data")
"""The error about a plan or a state of other data."""
does_not_fit = partial(InvalidPacking, code="does-not-fit")
"""The error about documents that are too long or too many."""
bad_file = partial(InvalidPacking, code="bad-file")
"""The error about a file or folder that is not there, not whole, or of another kind."""


def invalid(index: int, key: str, found: str, kind: str = "") -> InvalidPacking:
    """Return the error about the value of a key or column in one example."""
    return unusable(f"example {index}, {kind}{key!r}: {found}")


@contextmanager
def reworded(change: Callable[[str], str]) -> Iterator[None]:
    """Run a block, and change the messages of its errors about data."""
    try:
        yield
    except InvalidPacking as error:
        raise InvalidPacking(change(error.message), code=error.code) from error


def in_the_whole(numbers: Any) -> AbstractContextManager[None]:
    """Run a block on some of the examples, whose errors name them by their `numbers` in the
    whole."""
    return reworded(
        partial(re.sub, r"^example (\[?)(\d+)", lambda m: f"example {m[1]}{numbers[int(m[2])]}")
    )


def check_columns(names: Collection[Any], option: str) -> None:
    """Raise `InvalidPacking` unless names hold tokens, labels at most once, and no pairs. The
    message names the `option` that leaves names out."""
    if (other := next((name for name in names if not isinstance(name, str)), None)) is not None:
        raise unusable(f"wanted names that are text, found {other!r}; rename it, or drop it")
    pair = next((pair for pair in PAIRS if {*pair} <= {*names}), None)
    if pair is not None:
        raise InvalidPacking(
            f"found {pair[0]!r} and {pair[1]!r}: pairs are no documents, for a loss compares both. "
            "Leave them to the collator of their trainer, whose batches an enabled model runs "
            "without padding, and plan these batches by PackedBatchSampler. Or name "
            f"both in {option} to pack the rest; PackingCollator(labels='completions') makes "
            "documents of a prompt and answers",
            code="pairs-are-no-documents",
        )
    if IDS not in names:
        raise unusable(
            f"wanted 'input_ids', found {sorted(names)}; tokenize first (inputs_embeds are not "
            "packed)",
        )
    if len(labels := [name for name in names if name in LABEL_KEYS]) > 1:
        raise unusable(f"found {labels}, which all are labels; name all but one in {option}")


def refuse_unlike(
    names: Sequence[Collection[Any]],
    optional: Collection[Any],
    way: str,
    kind: str = "",
) -> None:
    """Raise `InvalidPacking` unless all examples have the same names, but for `optional` ones."""
    for index, found in enumerate(names):
        for name in sorted(({*names[0]} ^ {*found}) - {*optional}, key=str):
            lacking, other = (index, 0) if name in names[0] else (0, index)
            raise invalid(lacking, name, f"not found, but example {other} has it; {way}", kind)


def is_int(value: Any) -> bool:
    """Return True if a value is an int, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_ints(optional: bool = False, **options: Any) -> None:
    """Raise `ValueError` unless options are ints of at least 1, or of 0 or None where allowed."""
    for name, value in options.items():
        least = int(name not in FROM_0)
        if not (is_int(value) and value >= least) and not (optional and value is None):
            raise ValueError(
                f"{name}={value!r}: wanted an int of at least {least}{' or None' * optional}"
            )
        if name == "max_length" and value is not None and value > LONGEST:
            raise ValueError(f"{name}={value!r}: wanted at most {LONGEST:,}")


def check_in(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise `ValueError` unless an option is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: wanted one of {', '.join(map(repr, choices))}")


def check_names(option: str, value: Any, what: str) -> None:
    """Raise `ValueError` if an option is one text instead of several names."""
    if isinstance(value, str):
        raise ValueError(f"{option}={value!r}: wanted several {what}, such as ({value!r},)")


def labels_of(columns: Mapping[str, Any]) -> np.ndarray:
    """Return tokens as labels, (tokens,) int64: -100 where a mask of `COMPLETION_KEYS` is 0."""
    kept = np.logical_and.reduce(
        [np.asarray(columns[key]) for key in COMPLETION_KEYS if key in columns]
    )
    return np.where(kept, columns[IDS].astype(np.int64), IGNORED_LABEL)


def token_weights(
    targets: np.ndarray, lengths: np.ndarray, by: Weighing, weights: np.ndarray
) -> np.ndarray:
    """Return the weight of each token's loss, (tokens,) float32: 0 at tokens that are no targets.

    With `by="document"` the targets of a document share its weight, so that the weighted sum is a
    sum of the documents' mean losses; with `by="token"` each target has the weight of its document.
    `targets`, (tokens,) bool, is True where a label counts. Documents lie end to end with `lengths`
    tokens, (documents,) ints; `weights`, (documents,) floats, are their own.
    """
    if by == "document":
        counts = np.add.reduceat(targets, np.cumsum(lengths) - lengths, dtype=np.int64)
        weights = weights / np.maximum(counts, 1)
    return np.where(targets, np.repeat(weights, lengths), 0).astype(np.float32)
