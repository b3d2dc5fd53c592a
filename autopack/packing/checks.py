"""The names of columns that mean something to packing, and errors about values of examples and of options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from autopack.errors import InvalidPacking

IDS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LENGTHS = "seq_lengths"
"""Of packed rows: tokens of each document."""
LABEL_KEYS = ("labels", "label", "label_ids")
COMPLETION_KEYS = ("completion_mask", "assistant_masks")
"""1 at tokens that are targets where an example has no labels."""
PAIRS = (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))
"""Two columns that together make an example a pair: text, and tokens by the names that TRL has given them."""


def invalid(index: int, key: str, found: str, kind: str = "") -> InvalidPacking:
    """The error about a value of one example."""
    return InvalidPacking(f"example {index}, {kind}{key!r}: {found}")


def refuse_pairs(names: Collection[Any], where: str, option: str) -> None:
    """Raises `InvalidPacking` where these keys or columns are those of preference data."""
    pair = next((pair for pair in PAIRS if {*pair} <= {*names}), None)
    if pair is not None:
        raise InvalidPacking(
            f"{where}found {pair[0]!r} and {pair[1]!r}: pairs are no documents, for a loss compares both. Leave them "
            f"to the collator of their trainer, whose batches an enabled model runs without padding, and plan these "
            f"batches by PackedBatchSampler(autopack.packing.pair_lengths(dataset, collator), ...). Or name both in "
            f"{option} to pack the rest; PackingCollator(completions=True) makes documents of a prompt and its answers"
        )


def is_int(value: Any) -> bool:
    """Whether a value is an int, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int, optional: bool = False, most: int | None = None) -> None:
    """Raises `ValueError` for an option that is no int of such a size, nor None where it is optional."""
    if not (is_int(value) and value >= least) and not (optional and value is None):
        raise ValueError(f"{name}={value!r}: wanted an int of at least {least}{' or None' * optional}")
    if most is not None and value is not None and value > most:
        raise ValueError(f"{name}={value!r}: wanted at most {most:,}")


def check_in(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises `ValueError` for an option that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: wanted one of {', '.join(map(repr, choices))}")


def check_names(option: str, value: Any, what: str) -> None:
    """Raises `ValueError` for an option that is one name where several are wanted."""
    if isinstance(value, str):
        raise ValueError(f"{option}={value!r}: wanted several {what}, such as ({value!r},)")
