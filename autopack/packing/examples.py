"""Read one example for the collator: its values as arrays, without padding, and its documents'
starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopack.layout import COMPLETION_KEYS, LABEL_KEYS
from autopack.layout.ways import OF_EXAMPLES, TABLE
from autopack.packing.checks import (
    DOCUMENT_WEIGHT,
    IDS,
    LENGTHS,
    LOSS_WEIGHTS,
    MASK,
    POSITIONS,
    check_columns,
    invalid,
    is_text,
    numbered,
    numbers,
    refuse_unlike,
    unusable,
)
from autopack.packing.media import SEEN, is_media, seen_per_token, take_pictures

PER_DOCUMENT = ("start_positions", "end_positions", "next_sentence_label")
PROMPT, COMPLETIONS = "prompt_ids", "completion_ids"
ANSWERS = ("chosen_ids", "rejected_ids")
"""Columns of tokens, by the names of TRL."""


@dataclass
class Example:
    """One example as arrays by key: values per token (tokens, ...).

    Keys in `of_documents` have values per document, (documents, ...). `starts` are the tokens at
    which its documents start; the first is 0. `media` belong to all of them.
    """

    columns: dict[str, np.ndarray]
    starts: np.ndarray
    of_documents: set[str] = field(default_factory=set)
    media: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns[IDS])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, (documents,) ints."""
        return np.diff(self.starts, append=len(self))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and the documents that begin in them, in place."""
        self.starts = self.starts[self.starts < length]
        ends = length, len(self.starts)
        self.columns = {k: v[: ends[k in self.of_documents]] for k, v in self.columns.items()}


def _of_completions(values: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt and its completions as an example of documents that begin with the prompt.

    Their keys are taken out of `values`. Tokens of completions are targets, tokens of the prompt
    are not. An empty completion has no target. Raises `InvalidPacking` for a prompt without
    completions, and for values that are no lists of tokens.
    """
    if IDS in values:
        raise unusable(f"{IDS!r}: found beside {PROMPT!r}; name one of them in drop_keys")
    given = {name: values.pop(name) for name in (COMPLETIONS, *ANSWERS) if name in values}
    if [*given] not in ([COMPLETIONS], [*ANSWERS]):
        raise unusable(
            f"{PROMPT!r}: wanted {COMPLETIONS!r}, or {ANSWERS[0]!r} and {ANSWERS[1]!r} beside it; "
            f"found {[*given] or 'neither'}"
        )
    prompt, (name, *_), rests = _tokens(PROMPT, values.pop(PROMPT)), given, [*given.values()]
    if name == COMPLETIONS and len(rests[0]) and np.ndim(rests[0][0]) > 0:
        (rests,) = rests  # several completions
    documents = [np.concatenate([prompt, _tokens(name, rest)]) for rest in rests]
    lengths = np.array([*map(len, documents)])
    if not lengths.all():
        raise unusable(f"{name!r}: found no token, nor in {PROMPT!r}; leave empty documents out")
    targets = (numbered(lengths) >= len(prompt)).astype(np.int64)
    made = {IDS: np.concatenate(documents), COMPLETION_KEYS[0]: targets, LENGTHS: lengths}
    return made | values


def _tokens(name: str, value: Any) -> np.ndarray:
    """Return token ids as an int array (tokens,); raise `InvalidPacking` for anything else."""
    found = numbers(name, value)
    if found.ndim != 1 or (found.size and found.dtype.kind != "i"):
        raise unusable(
            f"{name!r}: wanted tokens, ints of shape (T,), found {found.dtype} of shape "
            f"{found.shape}"
        )
    return found.astype(np.int64)


def read_example(
    example: Mapping[str, Any],
    ignored: Collection[str],
    weighs: bool,
    reads_pictures: bool,
    completes: bool,
) -> Example:
    """Return a mapping as an `Example`: arrays by key, without padding and ignored keys.

    `weighs` asks for weights of tokens from its weights of documents, `reads_pictures` for pixels
    from its pictures. With `completes` it may be a prompt and its completions, and any key may hold
    one number per document. Raises `InvalidPacking`.
    """
    if not isinstance(example, Mapping):
        raise unusable(f"wanted a mapping with 'input_ids', found {type(example).__name__}")
    given = {k: v for k, v in example.items() if v is not None and k not in ignored}
    if completes and PROMPT in given:
        given = _of_completions(given)
    check_columns(given, "drop_keys")
    ids = numbers(IDS, given.pop(IDS))
    is_row = ids.ndim == 2 and len(ids) == 1
    ids = ids[0] if is_row else ids
    if not ids.size:
        raise unusable(f"{IDS!r}: found no tokens; leave empty documents out")
    if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0:
        raise unusable(
            f"{IDS!r}: wanted token ids, ints of at least 0 of shape (T,), found {ids.dtype} of "
            f"shape {ids.shape} from {ids.min()}"
        )
    tokens, pictures = len(ids), take_pictures(given, reads_pictures)
    arrays = {
        key: numbers(key, value)
        for key, value in given.items()
        if key in (*LABEL_KEYS, *OF_EXAMPLES) or not is_text(value)
    }
    media = {
        key: arrays.pop(key)
        for key in [*arrays]
        if key in SEEN or is_media(key, arrays[key], tokens)
    }
    if is_row:
        arrays = {
            k: values[0] if values.ndim and len(values) == 1 else values
            for k, values in arrays.items()
        }
    declared = {key: arrays.pop(key) for key in OF_EXAMPLES if key in arrays}
    wanted = "one value per token, or one number per document of completions; name it in drop_keys"
    for key, values in declared.items():
        if key != LENGTHS and values.shape != ids.shape:
            raise unusable(
                f"{key!r}: found shape {values.shape} for {tokens} tokens, wanted {wanted}"
            )
    real, starts = _real_and_starts(declared, tokens)
    read = Example({IDS: ids[real]}, starts)
    if POSITIONS in declared:
        read.columns[POSITIONS] = declared[POSITIONS][real]
    if pictures:
        read.media["images"] = pictures
    for key, values in media.items():
        read.media[key] = seen_per_token(key, values, tokens)[real] if key in SEEN else values
    documents, is_packed = len(starts), LENGTHS in declared
    for key, values in arrays.items():
        of_each, name = np.atleast_1d(values), "labels" if key in LABEL_KEYS else key
        if key == LOSS_WEIGHTS and weighs:
            raise unusable(
                f"{key!r}: found beside the option loss_weights=; give one of them, or drop it"
            )
        if key == DOCUMENT_WEIGHT and weighs:
            if of_each.shape != starts.shape or not 0 <= of_each.min() <= of_each.max() < np.inf:
                raise unusable(
                    f"{key!r}: found {of_each.tolist()}, wanted a finite number of at least 0 for "
                    f"each of {documents} document(s)"
                )
            read.columns[key] = of_each
        elif name == "labels" and values.shape == ids.shape and values.dtype.kind != "f":
            read.columns[name] = values[real].astype(np.int64)
            continue
        elif name in ("labels", *PER_DOCUMENT):
            read.columns[name] = _targets(key, values, tokens, documents, is_packed)
        elif (
            completes
            and key not in COMPLETION_KEYS
            and of_each.shape == starts.shape
            and (is_packed or not values.ndim)
        ):
            read.columns[key] = of_each
        elif values.shape[:1] == ids.shape and values.ndim <= 2:
            read.columns[key] = values[real]
            continue
        else:
            raise unusable(
                f"{key!r}: found shape {values.shape} for {tokens} tokens, wanted {wanted}"
            )
        read.of_documents.add(name)
    return read


def merge(examples: Sequence[Any], ignored: Collection[str]) -> Example | None:
    """Return plain examples as one `Example` with a document for each; None if any is not plain.

    Plain ones have tokens, and labels per token or none. Most batches are such, and reading short
    documents one by one takes longer than all the rest. Examples to refuse are not plain: they are
    reported one by one.
    """
    if any(type(e) is not dict or e.keys() != examples[0].keys() for e in examples):
        return None
    given = {k: [each[k] for each in examples] for k in examples[0] if k not in ignored}
    if IDS not in given or not {*given} <= {IDS, MASK, "labels"}:
        return None
    try:
        columns = {k: np.concatenate(v, dtype=np.int64, casting="no") for k, v in given.items()}
        (lengths,) = {tuple(map(len, values)) for values in given.values()}
    except (RuntimeError, TypeError, ValueError):  # of what is no int64 of one axis and length
        return None
    is_plain = 0 not in lengths and all(values.ndim == 1 for values in columns.values())
    real = columns.pop(MASK, np.ones(1))
    if not is_plain or columns[IDS].min() < 0 or (real != 1).any():
        return None
    return Example(columns, np.cumsum([0, *lengths[:-1]]))


def _real_and_starts(columns: Mapping[str, np.ndarray], tokens: int) -> tuple[slice, np.ndarray]:
    """Return the slice of an example's tokens without padding, and its documents' starts in that.

    All columns that declare documents are read, and have to agree.
    """
    real, declared = slice(0, tokens), dict[str, np.ndarray]()
    if (mask := columns.get(MASK)) is not None:
        ones = np.flatnonzero(mask)
        if not (mask >= 0).all() or not ones.size:
            raise unusable(
                f"{MASK!r}: found values from {mask.min()} to {mask.max()}; wanted 0 at padding "
                "and 1 at one token or more"
            )
        real = slice(int(ones[0]), int(ones[-1]) + 1)
        mask = mask[real]
        if len(mask) != ones.size:
            raise unusable(
                f"{MASK!r}: found a zero between ones, at token {real.start + mask.argmin()}; take "
                "such tokens out"
            )
        if mask.max() > 1:
            declared[MASK] = np.flatnonzero(np.diff(mask)) + 1
    for way in TABLE:
        if way.starts is not None and way.name in columns:
            declared[way.name] = np.flatnonzero(way.starts(columns[way.name][None, real])[0])[1:]
    if LENGTHS in columns:
        lengths, tokens = np.atleast_1d(columns[LENGTHS]), real.stop - real.start
        if (
            lengths.ndim != 1
            or lengths.dtype.kind != "i"
            or (lengths < 1).any()
            or lengths.sum() != tokens
        ):
            raise unusable(
                f"{LENGTHS!r}: found {lengths.tolist()}; wanted lengths that sum to {tokens} (was "
                "the row cut? TRL's SFTConfig does that, unless it has max_length=None)"
            )
        declared[LENGTHS] = np.cumsum(lengths)[:-1]
    if POSITIONS in columns:
        positions = columns[POSITIONS][real]
        if positions.dtype.kind != "i" or positions.min() < 0:
            raise unusable(
                f"{POSITIONS!r}: wanted ints >= 0, found {positions.dtype} from {positions.min()}"
            )
        step = np.diff(positions)
        if not declared and (step > 1).any():
            at = int(np.argmax(step > 1))
            raise unusable(
                f"{POSITIONS!r}: jump from {positions[at]} to {positions[at + 1]}, where a packed "
                "row starts a new document; name them in drop_keys, or add seq_idx if it is one"
            )
        declared[POSITIONS] = np.flatnonzero(step != 1) + 1
    name, inner = next(iter(declared.items()), ("", np.empty(0, np.int64)))
    for other, starts in declared.items():
        if not np.array_equal(starts, inner):
            raise unusable(
                f"{other!r}: starts documents at {[0, *starts.tolist()]}, but {name!r} at "
                f"{[0, *inner.tolist()]}; name the wrong one in drop_keys"
            )
    return real, np.concatenate([[0], inner])


def _targets(
    key: str, values: np.ndarray, tokens: int, documents: int, is_packed: bool
) -> np.ndarray:
    """Return labels of documents, (documents, ...); raise `InvalidPacking` for another shape.

    With `is_packed` they come as a list.
    """
    values = values.astype(np.int64) if values.dtype.kind == "b" else values
    is_vector = values.ndim == 1 and values.dtype.kind == "f"
    is_list = values.shape[:1] == (1,) and (is_packed or (values.ndim == 1 and not is_vector))
    if is_list if documents == 1 else values.ndim in (1, 2) and len(values) == documents:
        return values
    if documents == 1 and (values.ndim == 0 or is_vector):
        return values[None]
    raise unusable(
        f"{key!r}: found {values.dtype} of shape {values.shape} for {tokens} tokens in "
        f"{documents} document(s); wanted an int per token, or per document an int (a class), a "
        "float or a vector of floats"
    )


def check_alike(examples: list[Example]) -> None:
    """Raise `InvalidPacking` unless all examples have the same keys, each with values of one shape.

    Own positions are optional.
    """
    sorts = [
        {
            k: f"values per {'document' if k in e.of_documents else 'token'} of shape {v.shape[1:]}"
            for k, v in e.columns.items()
        }
        for e in examples
    ]
    refuse_unlike(sorts, (POSITIONS,), "add it, or name it in drop_keys")
    for index, found in enumerate(sorts):
        for key, wanted in sorts[0].items():
            if found.get(key, wanted) != wanted:
                raise invalid(
                    index,
                    key,
                    f"found {found[key]}, but {wanted} in example 0; make them equal (vectors of "
                    "floats as labels are targets of a whole document)",
                )


def joined(examples: list[Example], first_position: int) -> Example:
    """Return the examples of a batch as one; all get positions, in place, if any has its own."""
    if any(POSITIONS in example.columns for example in examples):
        for example in examples:
            example.columns.setdefault(POSITIONS, numbered(example.lengths) + first_position)

    lengths = np.concatenate([example.lengths for example in examples])
    whole = Example({}, np.cumsum(lengths) - lengths, examples[0].of_documents)
    for key in examples[0].columns:
        found = np.concatenate([example.columns[key] for example in examples])
        is_float = found.dtype.kind == "f"  # of ints and floats, too
        whole.columns[key] = found.astype(np.float32, copy=False) if is_float else found
    return whole
