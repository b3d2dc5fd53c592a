"""How the installed transformers makes masks: the functions it registers, and what a rule of theirs says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopack.inspection.mask_rules import seen_by

try:
    from transformers import masking_utils as masking
except ImportError:  # up to 4.52
    masking = None  # type: ignore[assignment]

MASKING_UTILS = "transformers.masking_utils"

READ = ("batch_size", "kv_length", "mask_function", "attention_mask")
"""What is read of a call of a mask function of transformers'."""


def has_mask_interface() -> bool:
    """Whether masks are made by registered functions (4.53 and later)."""
    return hasattr(masking, "AttentionMaskInterface")


def mask_mapping() -> tuple[str, str]:
    """Module and path of the mapping from implementation name to mask function."""
    return MASKING_UTILS, "AttentionMaskInterface._global_mapping"


def mask_function(implementation: str) -> Callable[..., Any] | None:
    """The mask function registered under a name; None where there is none."""
    return masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)


@dataclass(frozen=True)
class Pattern:
    """Which earlier and later tokens of its document a token sees: reach in tokens, None for unlimited."""

    causal: bool
    before: int | None = None
    after: int | None = None
    chunk: int | None = None


def describe_mask(function: Callable[..., Any]) -> Pattern | None:
    """Recognise a mask function of transformers, or return None where it is anything else.

    Used only to choose a faster backend; a function that is not recognised is evaluated as it stands.
    """
    if function is masking.causal_mask_function:
        return Pattern(causal=True)
    if function is getattr(masking, "bidirectional_mask_function", None):
        return Pattern(causal=False)
    if torch.compiler.is_compiling():  # closures of functions that are made in traced code cannot be read
        seen = seen_by(function)
        return None if seen is None else Pattern(seen.causal, seen.before, seen.after, seen.chunk)
    cells = _closure(function)
    name = getattr(function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask":
        parts = [describe_mask(part) for part in cells.get("mask_functions", ())]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        reaches = zip(*((part.before, part.after, part.chunk) for part in found), strict=True)
        least = [min((reach for reach in each if reach is not None), default=None) for each in reaches]
        return Pattern(any(part.causal for part in found), *least)
    # The overlays say nothing of causality: they stand beside causal_mask_function or bidirectional_mask_function.
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Pattern(causal=False, before=int(cells["sliding_window"]) - 1)
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return Pattern(causal=False, before=int(cells["sliding_window"]), after=int(cells["sliding_window"]))
    chunked = name == "chunked_overlay.<locals>.inner_mask"
    return Pattern(causal=False, chunk=int(cells["chunk_size"])) if chunked else None


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}


def known_parts(function: Callable[..., Any]) -> list[Pattern]:
    """The recognised functions among those that a mask function combines, by intersection or union."""
    inner = [part for value in _closure(function).values() if isinstance(value, tuple | list) for part in value]
    if inner:
        return [pattern for part in inner if callable(part) for pattern in known_parts(part)]
    pattern = describe_mask(function)
    return [] if pattern is None else [pattern]


def captured_tensors(function: Callable[..., Any]) -> list[Any]:
    """All tensors that a mask function and the functions it combines have captured."""
    values = list(_closure(function).values())
    inner = [part for value in values if isinstance(value, tuple | list) for part in value if callable(part)]
    inner += [value for value in values if inspect.isfunction(value)]
    own = [value for value in values if isinstance(value, torch.Tensor)]
    return own + [tensor for part in inner for tensor in captured_tensors(part)]


def plain_rule(causal: bool) -> Callable[..., Any]:
    """The mask function of an unrestricted causal or bidirectional attention."""
    if causal:
        return masking.causal_mask_function
    return getattr(masking, "bidirectional_mask_function", lambda batch, head, query, key: query >= 0)


def query_arguments(length: int, device: Any) -> dict[str, Any]:
    """How the installed mask functions are told the number of queries, for a call without a cache."""
    if "cache_position" in inspect.signature(masking.sdpa_mask).parameters:
        return {"cache_position": torch.arange(length, device=device)}
    return {"q_length": length, "q_offset": 0}


def with_length(arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arguments of a mask function for one document alone: one row of `length` tokens, no cache, no padding."""
    alone = dict(arguments, batch_size=1, kv_length=length, kv_offset=0, attention_mask=None)
    if "cache_position" in alone:  # up to 5.0; later releases say q_length and q_offset
        alone["cache_position"] = alone["cache_position"][:length]
    return alone | {name: at for name, at in (("q_length", length), ("q_offset", 0)) if name in alone}
