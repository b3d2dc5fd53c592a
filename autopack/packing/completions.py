"""Examples that are one prompt and what follows it: two answers of a pair, or any number of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import COMPLETION_KEYS, IDS, LENGTHS, invalid
from autopack.packing.lengths import numbers

PROMPT, COMPLETIONS = "prompt_ids", "completion_ids"
ANSWERS = ("chosen_ids", "rejected_ids")
"""Columns of tokens, by the names that TRL has given them."""


def as_documents(index: int, example: Any) -> Any:
    """An example of a prompt and its completions as one of as many documents, each of which begins with the prompt.

    Tokens of completions are targets, those of the prompt are none. Any other example stays as it is. Raises
    `InvalidPacking` for a prompt without completions, and for what is no list of tokens.
    """
    if not isinstance(example, Mapping) or PROMPT not in example:
        return example
    if IDS in example:
        raise invalid(index, IDS, f"found beside {PROMPT!r}; name one of them in drop_keys")
    names = [name for name in (COMPLETIONS, *ANSWERS) if example.get(name) is not None]
    if names not in ([COMPLETIONS], list(ANSWERS)):
        wanted = f"wanted {COMPLETIONS!r}, or {ANSWERS[0]!r} and {ANSWERS[1]!r}"
        raise invalid(index, PROMPT, f"{wanted} beside it; found {names or 'neither'}")
    prompt = _tokens(index, PROMPT, example[PROMPT])
    given: Sequence[Any] = [example[name] for name in names]
    if names == [COMPLETIONS]:
        given = given[0] if _holds_lists(given[0]) else given
        rests = [_tokens(index, COMPLETIONS, of) for of in given]
    else:
        rests = [_tokens(index, name, of) for name, of in zip(names, given, strict=True)]
    documents = [np.concatenate([prompt, rest]) for rest in rests]
    targets = [np.arange(len(document)) >= len(prompt) for document in documents]
    others = {name: value for name, value in example.items() if name not in (PROMPT, COMPLETIONS, *ANSWERS)}
    return {
        IDS: np.concatenate(documents),
        COMPLETION_KEYS[0]: np.concatenate(targets).astype(np.int64),
        LENGTHS: [len(document) for document in documents],
        **others,
    }


def _holds_lists(value: Any) -> bool:
    return bool(len(value)) and np.ndim(value[0]) > 0


def _tokens(index: int, name: str, value: Any) -> np.ndarray:
    try:
        found = numbers(value)
    except ValueError as error:
        raise invalid(index, name, str(error)) from error
    if found.ndim != 1 or not found.size or found.dtype.kind != "i":
        wanted = "wanted tokens, ints of shape (T,)"
        raise InvalidPacking(f"example {index}, {name!r}: {wanted}, found {found.dtype} of shape {found.shape}")
    return found
