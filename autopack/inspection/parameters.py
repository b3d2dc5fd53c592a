"""What a class's forward takes: read from the code that runs, and followed through forwards that only pass on.

A thin subclass, `def forward(self, *args, **kwargs): return super().forward(*args, **kwargs)`, takes what the class
below it takes, and so does a class whose forward somebody has wrapped. Nothing is remembered by class: a forward may be
patched at any time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Parameters:
    """The parameters of a forward: `names` in order, without `self`, and whether it takes others by `**kwargs`."""

    names: tuple[str, ...]
    takes_others: bool


def parameters_of(cls: Any) -> Parameters:
    """The parameters that a call of a module of this class may bring.

    Of a forward that hands `*args` or `**kwargs` on to another forward, those of the other are among them.
    """
    codes = forward_codes(cls)
    names = dict.fromkeys(name for code in codes for name in _own_names(code))
    return Parameters(tuple(names), bool(codes) and bool(codes[-1].co_flags & inspect.CO_VARKEYWORDS))


def forward_codes(cls: Any) -> list[CodeType]:
    """The code of a class's forward, and of those that it hands its arguments on to, in the order in which they run."""
    found = []
    for function in _forwards(cls):
        code = function.__code__
        found.append(code)
        takes_any = code.co_flags & (inspect.CO_VARKEYWORDS | inspect.CO_VARARGS)
        # It hands on what it takes by a name, `super().forward(...)`, or to one that it is wrapped around.
        if not takes_any or (_own_names(code) and "forward" not in code.co_names and not _inner(function)):
            break
    return found


def _own_names(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]


def _forwards(cls: Any) -> Iterator[FunctionType]:
    """Each forward that a class has, the one that runs first; the functions that one is wrapped around follow it."""
    seen: set[FunctionType] = set()
    waiting = [vars(base)["forward"] for base in reversed(cls.__mro__) if "forward" in vars(base)]
    while waiting:
        forward = waiting.pop()
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        if isinstance(function, FunctionType) and function not in seen:
            seen.add(function)
            yield function
            waiting += reversed(_inner(function))


def _inner(function: FunctionType) -> list[FunctionType]:
    """The functions of modules that a forward holds, as a wrapper without `functools.wraps` holds what it wraps."""
    held = inspect.getclosurevars(function)
    values = (*held.nonlocals.values(), *held.globals.values())
    found = [(v, inspect.unwrap(v)) for v in values if inspect.isfunction(v) and v is not function]
    # Where a kernel stands in the place of a function, the innermost is a module.
    return [v for v, inner in found if isinstance(inner, FunctionType) and inner.__code__.co_varnames[:1] == ("self",)]
