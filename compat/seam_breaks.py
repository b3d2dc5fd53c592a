"""What a seam is, and the few ways in which a function is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
Break = Callable[[Function], Function]
"""Makes of a function the one that takes its place."""


@dataclass(frozen=True)
class Seam:
    """A function ("module:Class.name"), what breaks it, and the tests that must fail by that."""

    name: str
    at: str
    breaks: Break
    tests: tuple[str, ...]


def unchanged(function: Function) -> Function:
    """Return the function itself: what the tests have to pass with."""
    return function


def returns(value: Any) -> Break:
    """Return a value without calling the function."""
    return lambda function: lambda *args, **kwargs: value


skipped = returns(None)
"""Do nothing: what the function refuses passes, what it does is not done."""


def result(change: Function) -> Break:
    """Return what `change` makes of the function's result."""
    return lambda function: lambda *args, **kwargs: change(function(*args, **kwargs))


def around(change: Function) -> Break:
    """Call `change` with the function and its arguments instead."""
    return lambda function: lambda *args, **kwargs: change(function, *args, **kwargs)


def never(change: Function) -> Break:
    """Return what `change` gives of the arguments, without calling the function."""
    return lambda function: change


def stale(function: Function) -> Function:
    """Return for ever what the function gave of its first argument when it was first asked."""
    known: dict[int, Any] = {}

    def first(*args: Any, **kwargs: Any) -> Any:
        if id(args[0]) not in known:
            known[id(args[0])] = (args[0], function(*args, **kwargs))
        return known[id(args[0])][1]

    return first
