"""Masks of the installed transformers: its registered mask functions, and the rules in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import torch

from autopack.inspection.mask_rules import Pattern, pattern_of

try:
    from transformers import masking_utils as masking
except ImportError:  # up to 4.52
    masking = None  # type: ignore[assignment]

Function = Callable[..., Any]
MASKING_UTILS = "transformers.masking_utils"
MAPPING = (MASKING_UTILS, "AttentionMaskInterface._global_mapping")
"""Module and path of the mapping from implementation name to mask function."""

READ = ("batch_size", "kv_length", "mask_function", "attention_mask")
"""Arguments that autopack reads from a call of transformers' mask functions."""

CAUSAL: Function | None = getattr(masking, "causal_mask_function", None)
_CAUSAL_PATTERN = None if CAUSAL is None else pattern_of(CAUSAL)
"""The rule of nearly all layers, and the tokens that it lets a token see, which is asked once."""


def has_mask_interface() -> bool:
    """Return True if registered functions make masks (4.53 and later)."""
    return hasattr(masking, "AttentionMaskInterface")


def mask_function(implementation: str) -> Function | None:
    """Return the mask function registered under a name; None if there is none."""
    return masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)


def describe_mask(function: Function) -> Pattern | None:
    """Return a mask function's `Pattern` for a document alone, or None if it is not recognised.

    Used only to choose a faster backend; a function that is not recognised is evaluated as it
    stands.
    """
    if torch.compiler.is_compiling():
        # closures of functions that are made in traced code cannot be opened
        return pattern_of(function)
    return _CAUSAL_PATTERN if function is CAUSAL else pattern_of(_without_padding(function))


class _NoPadding:
    """The number of padding tokens in each row of a document alone: 0."""

    def __getitem__(self, row: Any) -> int:
        return 0


def _without_padding(function: Any) -> Any:
    """Return a copy of a mask function in which it and its parts have a `left_padding` of 0."""
    if not inspect.isfunction(function) or not function.__closure__:
        return function
    cells = []
    for name, value in _closure(function).items():
        if isinstance(value, tuple | list):
            value = tuple(_without_padding(part) for part in value)
        elif name == "left_padding":
            value = _NoPadding()
        cells.append(CellType(value))
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _closure(function: Function) -> dict[str, Any]:
    """Return the variables of a function's closure, by name."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return (
        dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
        if code
        else {}
    )


def _parts(function: Function) -> Iterator[Function]:
    """Yield a mask function and all functions that it combines."""
    yield function
    for value in _closure(function).values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if inspect.isfunction(part):
                yield from _parts(part)


def known_parts(function: Function) -> list[Pattern]:
    """Return the patterns recognised in a mask function and in the functions that it combines."""
    return [found for part in _parts(function) if (found := describe_mask(part)) is not None]


def captured_tensors(function: Function) -> list[torch.Tensor]:
    """Return all tensors that a mask function and the functions it combines have captured."""
    values = (value for part in _parts(function) for value in _closure(part).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_length(arguments: Mapping[str, Any], length: int, **others: Any) -> dict[str, Any]:
    """Return a mask function's arguments with `length` queries and keys, no cache, and `others`."""
    found = {**arguments, "kv_length": length, "kv_offset": 0, **others}
    if "cache_position" in found:  # up to 5.0; later releases say q_length and q_offset
        found["cache_position"] = torch.arange(length, device=found["cache_position"].device)
    return found | {
        name: at for name, at in (("q_length", length), ("q_offset", 0)) if name in found
    }
