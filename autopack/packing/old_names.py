"""Names that arguments and attributes had in the release before: they work for one release more, and warn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")
Class = TypeVar("Class", bound=type)


def renamed(**names: str) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Let a function be called with arguments by their old names: `renamed(old="new")`. Warns with `FutureWarning`."""

    def decorate(function: Callable[Given, Made]) -> Callable[Given, Made]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            for old, new in names.items():
                if old in kwargs:
                    warn(old, new)
                    if new in kwargs:
                        raise TypeError(f"{old}= is {new}= by its old name: pass one of them")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


class OldName(property):
    """An attribute by its old name."""


def with_old_names(**names: str) -> Callable[[Class], Class]:
    """The same for a class: for the arguments that make an instance, and for its attributes."""

    def decorate(cls: Class) -> Class:
        wrapped: Any = cls
        wrapped.__init__ = renamed(**names)(wrapped.__init__)
        for old, new in names.items():
            setattr(cls, old, OldName(functools.partial(_read, old, new), doc=f"The old name of `{new}`."))
        return cls

    return decorate


def warn(old: str, new: str) -> None:
    """Say at the caller's caller that something has another name now."""
    warnings.warn(f"{old} is called {new} now; the old name goes with autopack 0.3", FutureWarning, stacklevel=3)


def _read(old: str, new: str, instance: Any) -> Any:
    warn(old, new)
    return getattr(instance, new)
