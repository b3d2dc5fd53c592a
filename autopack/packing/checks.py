"""Columns and options that packing interprets, and errors about them; numbers from lists, arrays
and tensors; lengths of documents, and pieces of those too long."""

from __future__ import annotations

import array
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
Overflow = Literal["error", "truncate", "split", "drop"]


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
    """Return the error that a key or column of example `index` has a wrong value, `found`."""
    return unusable(f"example {index}, {kind}{key!r}: {found}")


@contextmanager
def reworded(change: Callable[[str], str]) -> Iterator[None]:
    """Run a `with` block whose `InvalidPacking` errors get the messages `change(message)`."""
    try:
        yield
    except InvalidPacking as error:
        raise InvalidPacking(change(error.message), code=error.code) from error


def renumbered(numbers: Any) -> AbstractContextManager[None]:
    """Run a `with` block whose `InvalidPacking` errors name example i as example `numbers[i]`."""
    return reworded(
        partial(re.sub, r"^example (\[?)(\d+)", lambda m: f"example {m[1]}{numbers[int(m[2])]}")
    )


def check_columns(names: Collection[Any], option: str) -> None:
    """Raise `InvalidPacking` unless names include `input_ids`, one of labels at most, no pair.

    The message advises to leave names out by the `option`.
    """
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
            "packed)"
        )
    if len(labels := [name for name in names if name in LABEL_KEYS]) > 1:
        raise unusable(f"found {labels}, which all are labels; name all but one in {option}")


def refuse_unlike(
    names: Sequence[Collection[Any]], optional: Collection[Any], remedy: str, kind: str = ""
) -> None:
    """Raise `InvalidPacking` unless all examples have the same names, except for `optional` ones.

    The message ends with the `remedy`.
    """
    for index, found in enumerate(names):
        for name in sorted(({*names[0]} ^ {*found}) - {*optional}, key=str):
            lacking, other = (index, 0) if name in names[0] else (0, index)
            raise invalid(lacking, name, f"not found, but example {other} has it; {remedy}", kind)


def is_int(value: Any) -> bool:
    """Return True if a value is an int, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_ints(optional: bool = False, **options: Any) -> None:
    """Raise `ValueError` unless options are ints of at least 1, or 0 or None where allowed.

    0 is allowed for options in `FROM_0`, None if `optional`.
    """
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


def check_options(of: Any, values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for values that the annotations of a function or class do not allow.

    Checked are ints, choices, booleans, and collections of one of them.
    """
    hints = get_type_hints(of)
    for name, value in values.items():
        _check(name, value, hints.get(name))


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise `ValueError` unless an annotation allows the value of an option."""
    kinds = (hint, *get_args(hint))
    optional = type(None) in kinds
    if get_origin(hint) is Collection:
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r}: wanted several, such as ({value!r},)")
        for each in value:
            _check(name, each, kinds[1])
    elif int in kinds:
        check_ints(optional, **{name: value})
    elif choices := [c for k in kinds if get_origin(k) is Literal for c in get_args(k)]:
        check_in(name, value, [*choices, *[None] * optional])
    elif hint is bool:
        check_in(name, value, (True, False))


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


@dataclass(frozen=True)
class Counts:
    """Numbers of documents and tokens given to a plan, and of what `overflow` did to long ones.

    `documents` and `tokens` were given; `truncated` documents lost `truncated_tokens` at their
    ends, `split` documents were cut into several pieces, and `dropped` documents, of
    `dropped_tokens`, were left out.
    """

    documents: int
    tokens: int
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    dropped: int = 0
    dropped_tokens: int = 0

    @property
    def overflow(self) -> dict[str, int]:
        """Numbers of documents or tokens truncated, split or dropped, by name, if not 0."""
        treatments = [*vars(self).items()][2:]  # what stands behind documents and tokens
        return {name.replace("_", " "): value for name, value in treatments if value}

    @property
    def level(self) -> int:
        """Level to log the counts at: a warning if tokens were lost."""
        return logging.WARNING if self.truncated or self.dropped else logging.INFO


def nothing_left(counts: Counts) -> InvalidPacking:
    """Return the error for data whose documents were all dropped."""
    return does_not_fit(
        f"no document is left of {counts.documents:,}: all are longer than max_length; raise it"
    )


@dataclass(frozen=True, eq=False, repr=False)
class Pieces:
    """Documents, or parts of them: index, first token and length of each, (pieces,) int64.

    `shared` are the tokens that another piece begins with and computes; None if there are none.
    """

    documents: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray | None

    @property
    def _computed(self) -> np.ndarray:
        """Number of tokens of each piece without shared ones, (pieces,) int64."""
        return self.lengths if self.shared is None else self.lengths - self.shared

    def _take(self, order: np.ndarray) -> Any:
        """Return the pieces at these indices; offsets made by `zeros` stay one number in memory."""
        given = {each.name: getattr(self, each.name) for each in fields(Pieces)}
        return replace(
            self,
            **{
                name: np.broadcast_to(v[:1], order.shape) if v.strides == (0,) else v[order]
                for name, v in given.items()
                if v is not None
            },
        )

    def _rows(self, bounds: np.ndarray, chosen: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return the pieces of `chosen` rows, by the `bounds` of all rows, and their own bounds."""
        sizes = np.diff(bounds)[chosen]
        return self._take(np.repeat(bounds[chosen], sizes) + numbered(sizes)), bounds_of(sizes)


def to_numpy(value: Any) -> Any:
    """Return a tensor as a numpy array, floats as float32; other values unchanged."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def numbers(key: str, value: Any) -> np.ndarray:
    """Return a list, array or tensor as an int64, float32 or bool array; raise for other values."""
    try:
        if isinstance(value, (list, tuple)):
            # not all ints; numpy alone is slower, and makes floats of [1, 2**63]
            with suppress(TypeError):
                return np.asarray(array.array("q", value))
        found = np.asarray(to_numpy(value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise unusable(
            f"{key!r}: cannot be read as numbers ({error}); fix it, or name it in drop_keys"
        ) from error
    kind = found.dtype.kind
    if kind not in "biuf" or (kind == "u" and found.size and found.max() > np.iinfo(np.int64).max):
        raise unusable(
            f"{key!r}: found {found.dtype}, wanted int64, floats or bools; or name it in drop_keys"
        )
    return found.astype({"b": np.bool_, "f": np.float32}.get(kind, np.int64), copy=False)


def is_text(value: Any) -> bool:
    """Return True for text, a mapping, an array of text, or a list that begins with one of them."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (str, bytes, Mapping)) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "US"
    )


def bounds_of(sizes: Any) -> np.ndarray:
    """Return the bounds of parts of these sizes, end to end: (parts + 1,) ints, from 0 on."""
    return np.concatenate([[0], np.cumsum(sizes)])


def sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the sum of the values of each part, between its bounds; no part may be empty."""
    return np.add.reduceat(values, bounds[:-1]) if len(values) else values


def numbered(sizes: np.ndarray) -> np.ndarray:
    """Return each element's number in its part, for parts of these sizes: 0, 1, ..., 0, 1, ..."""
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)


def zeros(count: int) -> np.ndarray:
    """Return `count` int64 zeros as one number in memory: offsets of documents that are not cut."""
    return np.broadcast_to(np.int64(0), (count,))


def read(lengths: Any, copy: bool = True) -> np.ndarray:
    """Return lengths as (documents,) int64; raise `InvalidPacking` unless ints from 1 to `LONGEST`.

    Without `copy` the given array itself is returned, if it is such an array.
    """
    found = ints("lengths", lengths)
    if not len(found):
        raise no_examples("lengths: wanted at least one document, found none")
    wanted = f"wanted at least 1 token, and at most {LONGEST:,}; leave such documents out"
    check_each("lengths", found, (found < 1) | (found > LONGEST), wanted)
    return found.astype(np.int64, copy=copy)


def ints(name: str, given: Any) -> np.ndarray:
    """Return one int per document as an array, of Python's ints beyond 64 bits; raise otherwise."""
    try:
        if isinstance(given, Sequence):
            # of a column of datasets a list, which numpy would read one number at a time
            given = given[:]
        elif not (hasattr(given, "__array__") or isinstance(given, Mapping)):
            given = list(given)
        found = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong_numbers(
            f"{name}: wanted one int per document, found what is no array: {error}"
        ) from error
    if found.ndim != 1:
        raise wrong_numbers(
            f"{name}: wanted one int per document, found shape {found.shape}; pass len() of each"
        )
    if found.dtype.kind in "iu" or not found.size:
        return found
    values = np.asarray(given, object)
    is_other = np.array([not is_int(value) for value in values])
    check_each(name, values, is_other, f"wanted an int; convert from {found.dtype}")
    return values  # ints of more than 64 bits


def check_each(name: str, values: np.ndarray, wrong: np.ndarray, wanted: str) -> None:
    """Raise `InvalidPacking` for the first of the values at which `wrong` is True, if any."""
    if wrong.any():
        index = int(wrong.argmax())
        raise wrong_numbers(f"{name}[{index}] is {values.item(index)!r}: {wanted}")


def fit(lengths: np.ndarray, max_length: int, overflow: Overflow) -> tuple[Pieces, Counts]:
    """Return documents as pieces of at most `max_length`, by `overflow`, and their `Counts`."""
    count, tokens = len(lengths), int(lengths.sum())
    over = lengths > max_length
    if not over.any():
        return Pieces(np.arange(count), zeros(count), lengths, None), Counts(count, tokens)
    if overflow == "error":
        index = int(over.argmax())
        raise does_not_fit(
            f"lengths[{index}] is {lengths[index]}, over the {max_length} tokens of a row; raise "
            "max_length, or pass overflow='truncate', 'split' or 'drop'"
        )
    is_split = overflow == "split"
    parts = -(-lengths // max_length) if is_split else np.where(over, overflow == "truncate", 1)
    owners = np.repeat(np.arange(count), parts)
    offsets = numbered(parts) * max_length if is_split else zeros(len(owners))
    pieces = Pieces(owners, offsets, np.minimum(lengths[owners] - offsets, max_length), None)
    number, lost = int(over.sum()), tokens - int(pieces.lengths.sum())
    if is_split:
        return pieces, Counts(count, tokens, split=number)
    done = "dropped" if overflow == "drop" else "truncated"
    return pieces, Counts(count, tokens, **{done: number, f"{done}_tokens": lost})
