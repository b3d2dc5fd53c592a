"""Masks of the installed transformers: its registered mask functions, and the rules in them.

A rule is a function of indices (batch, head, query, key): True where the query sees the key. A mask
function makes a mask by a rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch

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


# --- The pattern of a rule, found by calling it with indices that note their comparisons. A rule
# that does anything else with its indices is unknown. Dynamo can run this while it traces.


class Unknown(Exception):
    """Error of a rule whose use of its indices autopack does not know."""


@dataclass(frozen=True)
class Pattern:
    """The tokens of its document that a token sees.

    `causal` hides later tokens; `before` and `after` count visible tokens on each side; `chunk` is
    the size of the chunks that tokens see. None stands for unlimited.
    """

    causal: bool
    before: int | None = None
    after: int | None = None
    chunk: int | None = None

    def reach(self, unlimited: int) -> tuple[int, int]:
        """Return how many tokens before and after it a token sees; `unlimited` stands for all."""
        before, after = self.before, 0 if self.causal else self.after
        return unlimited if before is None else before, unlimited if after is None else after

    @property
    def device(self) -> None:
        """None: a pattern lies on no device. transformers asks for it where it combines masks."""

    def to(self, device: Any) -> Pattern:
        """Return the pattern itself, where a tensor would be moved."""
        return self

    def __and__(self, other: Any) -> Pattern:
        if not isinstance(other, Pattern):
            raise Unknown
        reaches = [
            _narrower(self.before, other.before),
            _narrower(self.after, other.after),
            _narrower(self.chunk, other.chunk),
        ]
        return Pattern(self.causal or other.causal, *reaches)


class Index:
    """A linear index: `queries` × the query's index + `keys` × the key's index + `plus`."""

    def __init__(self, queries: int, keys: int, plus: int = 0):
        self.queries, self.keys, self.plus = queries, keys, plus

    def new_ones(self, shape: Any, dtype: Any = None) -> Pattern:
        """Return the pattern that hides nothing, where a tensor would make a mask of ones."""
        return Pattern(causal=False)

    def __add__(self, other: Any) -> Index:
        other = _as_index(other)
        return Index(self.queries + other.queries, self.keys + other.keys, self.plus + other.plus)

    def __sub__(self, other: Any) -> Index:
        other = _as_index(other)
        return Index(self.queries - other.queries, self.keys - other.keys, self.plus - other.plus)

    def __abs__(self) -> Distance:
        if (self.queries, self.keys, self.plus) not in ((1, -1, 0), (-1, 1, 0)):
            raise Unknown
        return Distance()

    def __floordiv__(self, size: Any) -> Chunk:
        of_one = (self.queries, self.keys, self.plus) in ((1, 0, 0), (0, 1, 0))
        if not of_one or not isinstance(size, int):
            raise Unknown
        return Chunk(self.keys == 1, size)

    def __le__(self, other: Any) -> Pattern:
        return (self - other).at_most(0)

    def __lt__(self, other: Any) -> Pattern:
        return (self - other).at_most(-1)

    def __ge__(self, other: Any) -> Pattern:
        return _as_index(other) <= self

    def __gt__(self, other: Any) -> Pattern:
        return _as_index(other) < self

    def at_most(self, bound: int) -> Pattern:
        """Return the pattern of tokens at which this index is at most `bound`."""
        reach, way = bound - self.plus, (self.queries, self.keys)
        if way in ((-1, 0), (0, -1)) and reach >= 0:
            return Pattern(causal=False)  # no index is negative
        if way == (1, -1) and reach >= 0:
            return Pattern(causal=False, before=reach)
        if way == (-1, 1) and reach >= 0:
            return Pattern(causal=True) if reach == 0 else Pattern(causal=False, after=reach)
        raise Unknown


class Distance:
    """The distance between query and key."""

    def __le__(self, other: Any) -> Pattern:
        if not isinstance(other, int) or other < 0:
            raise Unknown
        return Pattern(causal=False, before=other, after=other)


class Chunk:
    """The number of the chunk that a query or a key lies in."""

    def __init__(self, of_key: bool, size: int):
        self.of_key, self.size = of_key, size

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Chunk) or other.size != self.size or other.of_key == self.of_key:
            raise Unknown
        return Pattern(causal=False, chunk=self.size)

    __hash__ = None  # type: ignore[assignment]


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """Return the `Pattern` of a rule (batch, head, query, key); None if it is not recognised."""
    try:
        # what rows or heads decide is not known
        found = function(None, None, Index(1, 0), Index(0, 1))
    except Exception:  # of somebody's function that expects tensors or numbers, anything
        return None
    return found if isinstance(found, Pattern) else None


def _as_index(value: Any) -> Index:
    """Return a whole number as an `Index`, and an index unchanged. Raises `Unknown` for others."""
    if isinstance(value, Index):
        return value
    if type(value) is not int:
        raise Unknown
    return Index(0, 0, value)


def _narrower(one: Any, other: Any) -> Any:
    """Return the smaller of two limits; None is no limit."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


CAUSAL: Function | None = getattr(masking, "causal_mask_function", None)
_CAUSAL_PATTERN = None if CAUSAL is None else pattern_of(CAUSAL)
"""The rule of nearly all layers, and the tokens that it lets a token see, which is asked once."""


def has_mask_interface() -> bool:
    """Return True if transformers registers mask functions by implementation (4.53 and later)."""
    return hasattr(masking, "AttentionMaskInterface")


def mask_function(implementation: str) -> Function | None:
    """Return the mask function registered under a name; None if there is none."""
    return masking.ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)


def describe_mask(function: Function) -> Pattern | None:
    """Return a rule's `Pattern` for one document, without padding; None if it is not recognised.

    Used only to choose a faster backend; a rule that is not recognised is evaluated as it stands.
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
    """Return a copy of a rule in which it and all that it combines have a `left_padding` of 0."""
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


def _rules_in(function: Function) -> Iterator[Function]:
    """Yield a rule and all rules that it combines."""
    yield function
    for value in _closure(function).values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if inspect.isfunction(part):
                yield from _rules_in(part)


def known_parts(function: Function) -> list[Pattern]:
    """Return the patterns recognised in a rule and in the rules that it combines."""
    return [found for part in _rules_in(function) if (found := describe_mask(part)) is not None]


def captured_tensors(function: Function) -> list[torch.Tensor]:
    """Return all tensors that a rule, and the rules that it combines, have captured."""
    values = (value for part in _rules_in(function) for value in _closure(part).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_length(arguments: Mapping[str, Any], length: int, **others: Any) -> dict[str, Any]:
    """Return a mask function's arguments for `length` queries and keys, no cache, and `others`."""
    found = {**arguments, "kv_length": length, "kv_offset": 0, **others}
    if "cache_position" in found:  # up to 5.0; later releases say q_length and q_offset
        found["cache_position"] = torch.arange(length, device=found["cache_position"].device)
    return found | {
        name: at for name, at in (("q_length", length), ("q_offset", 0)) if name in found
    }
