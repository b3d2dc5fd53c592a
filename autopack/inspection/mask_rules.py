"""What a mask function says, found by calling it with indices that note what they are compared with.

It serves compiled code: Dynamo runs it while it traces, where the closures that `masks.describe_mask` reads cannot be
read. Whatever a function does with its indices beyond what is known here makes it unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unknown(Exception):
    """The function does something with its indices that is not known here."""


class Seen:
    """Which tokens are seen: none after (causal), so many before and after, those of one chunk; None for unlimited."""

    device = None

    def __init__(self, causal: bool = False, before: Any = None, after: Any = None, chunk: Any = None):
        self.causal, self.before, self.after, self.chunk = causal, before, after, chunk

    def to(self, device: Any) -> Seen:
        return self

    def __and__(self, other: Any) -> Seen:
        if not isinstance(other, Seen):
            raise Unknown
        reaches = [_least(self.before, other.before), _least(self.after, other.after), _least(self.chunk, other.chunk)]
        return Seen(self.causal or other.causal, *reaches)


class Index:
    """`queries` times the index of the query plus `keys` times that of the key plus a number."""

    def __init__(self, queries: int, keys: int, plus: int = 0):
        self.queries, self.keys, self.plus = queries, keys, plus

    def new_ones(self, shape: Any, dtype: Any = None) -> Seen:
        return Seen()

    def __add__(self, other: Any) -> Index:
        other = _index(other)
        return Index(self.queries + other.queries, self.keys + other.keys, self.plus + other.plus)

    def __sub__(self, other: Any) -> Index:
        other = _index(other)
        return Index(self.queries - other.queries, self.keys - other.keys, self.plus - other.plus)

    def __abs__(self) -> Distance:
        if (self.queries, self.keys, self.plus) not in ((1, -1, 0), (-1, 1, 0)):
            raise Unknown
        return Distance()

    def __floordiv__(self, size: Any) -> Chunk:
        if (self.queries, self.keys) not in ((1, 0), (0, 1)) or self.plus != 0 or not isinstance(size, int):
            raise Unknown
        return Chunk(self.keys == 1, size)

    def __le__(self, other: Any) -> Seen:
        return (self - _index(other)).at_most(0)

    def __lt__(self, other: Any) -> Seen:
        return (self - _index(other)).at_most(-1)

    def __ge__(self, other: Any) -> Seen:
        return (_index(other) - self).at_most(0)

    def __gt__(self, other: Any) -> Seen:
        return (_index(other) - self).at_most(-1)

    def at_most(self, bound: int) -> Seen:
        """What is seen where this is no more than a number."""
        reach, way = bound - self.plus, (self.queries, self.keys)
        if way in ((-1, 0), (0, -1)) and reach >= 0:
            return Seen()  # no index is negative
        if way == (1, -1) and reach >= 0:
            return Seen(before=reach)
        if way == (-1, 1) and reach >= 0:
            return Seen(causal=True) if reach == 0 else Seen(after=reach)
        raise Unknown


class Distance:
    """The distance between query and key."""

    def __le__(self, other: Any) -> Seen:
        if not isinstance(other, int) or other < 0:
            raise Unknown
        return Seen(before=other, after=other)


class Chunk:
    """The number of the chunk that a query or a key lies in."""

    def __init__(self, of_key: bool, size: int):
        self.of_key, self.size = of_key, size

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Chunk) or other.size != self.size or other.of_key == self.of_key:
            raise Unknown
        return Seen(chunk=self.size)

    __hash__ = None  # type: ignore[assignment]


def seen_by(function: Callable[..., Any]) -> Seen | None:
    """What a mask function of (row, head, query, key) lets a query see; None where that is not known."""
    try:
        found = function(0, 0, Index(1, 0), Index(0, 1))
    except Exception:  # of somebody's function that expects tensors or numbers, anything
        return None
    return found if isinstance(found, Seen) else None


def _index(value: Any) -> Index:
    if isinstance(value, Index):
        return value
    if type(value) is not int:
        raise Unknown
    return Index(0, 0, value)


def _least(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
