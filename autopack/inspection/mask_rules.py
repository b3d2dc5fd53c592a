"""The rule of a mask function, found by calling it with indices that note their comparisons.

A function that does anything else with its indices is unknown. Dynamo can run this while it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unknown(Exception):
    """Error of a mask function whose use of its indices autopack does not know."""


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
        if (
            (self.queries, self.keys) not in ((1, 0), (0, 1))
            or self.plus != 0
            or not isinstance(size, int)
        ):
            raise Unknown
        return Chunk(self.keys == 1, size)

    def __le__(self, other: Any) -> Pattern:
        return (self - _as_index(other)).at_most(0)

    def __lt__(self, other: Any) -> Pattern:
        return (self - _as_index(other)).at_most(-1)

    def __ge__(self, other: Any) -> Pattern:
        return (_as_index(other) - self).at_most(0)

    def __gt__(self, other: Any) -> Pattern:
        return (_as_index(other) - self).at_most(-1)

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
    """Return the pattern of a mask function of (row, head, query, key); None if it is not known."""
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
