"""Values that third-party code reads, so that a change of them is noticed.

A user redefines a function in a notebook, reloads a module, or changes a number or a dictionary
entry beside it. The model that uses it is then another one, and nothing on the model itself shows
it.
"""

from __future__ import annotations

import argparse
import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from autopack.inspection.code_origin import (
    is_made_in_c,
    is_of_autopack,
    is_of_library,
    is_own_file,
    layers,
    original,
)
from autopack.inspection.put_on import HOOKS
from autopack.inspection.source import names_in

_MOST = 4000
"""Most values that are compared at each call."""
_MEMBERS = 256
"""Size of a container above which only its length is compared."""
_BYTES = 4096
"""Bytes of a NumPy array above which only its identity is compared."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), numpy.generic)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module; compared elsewhere for modules inside the model."""
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property)

_OF_FUNCTIONS = 3
"""Number of the first values of a function that are its code and its defaults."""

Key = tuple[int, int]
"""The identity of what holds a value, and the value's number in it; -1 for how many it holds."""
Read = Callable[[], Sequence[Any]]


class Followed:
    """All that third-party code reaches by name, with what each of it holds now.

    `names` are the words of that code and `numbers` the whole numbers in it. A module `inside` the
    model is not opened where it is only mentioned.
    """

    def __init__(self, code: Iterable[Any], modules: Iterable[nn.Module], inside: Collection[nn.Module]):
        self.names: set[str] = set()
        self.numbers: set[int] = set()
        self._inside = set(map(id, inside))
        self.held: list[tuple[Any, Read, list[Any]]] = []  # an owner, what it holds, and what it held
        self._seen: dict[Any, Any] = {}
        self._waiting: deque[Any] = deque()
        count = 0
        for roots in (code, modules):  # of many layers the code is one, so it comes first
            self._waiting += roots
            while self._waiting and count < _MOST:
                value = self._waiting.popleft()
                if id(value) in self._seen:
                    continue
                self._seen[id(value)] = value  # held, so that nothing else gets its identity
                for owner, read in self._readers(value):
                    held = read()
                    count += len(held)
                    self.held.append((owner, read, [_kept(each) for each in held]))
                    self.numbers |= {each for each in held if isinstance(each, int)}
                    self._waiting += (each for each in held if self._is_followed(each))
        self._seen.clear()  # what is compared is held by its owner

    def changes(self) -> Iterator[tuple[Key, bool]]:
        """Yield what is no longer what it was, and True for each where code stands now."""
        for owner, read, kept in self.held:
            now = read()
            if len(now) != len(kept):
                yield (id(owner), -1), False
                continue
            for number, (before, value) in enumerate(zip(kept, now, strict=True)):
                if before is not value and _differs(before, value):
                    yield (id(owner), number), _is_code(owner, number, value)

    def take(self) -> None:
        """Compare with what is there now from here on."""
        self.held = [(owner, read, list(map(_kept, read()))) for owner, read, _ in self.held]

    def _is_followed(self, value: Any) -> bool:
        return not isinstance(value, (*_SIMPLE, ModuleType, CodeType)) and id(value) not in self._inside

    def _readers(self, value: Any) -> Iterator[tuple[Any, Read]]:
        """Yield what holds the values that an object reads, and a function that returns them."""
        if isinstance(value, type):
            kind: type = type(value)
            mros = (*value.__mro__, *kind.__mro__)
            bases = [base for base in mros if not is_of_library(base)]
            yield value, lambda: [each for base in bases for each in vars(base).values()]
        elif isinstance(value, dict | list | tuple | set):
            yield value, functools.partial(_members, value)
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= _BYTES:
                yield value, lambda: [value.tobytes()]
        elif isinstance(value, torch.Tensor):
            if not value.requires_grad and not value.is_inference():  # what is trained changes at every step
                yield value, lambda: [value._version]
        elif is_of_autopack(value):
            return
        elif isinstance(value, _WRAPPERS):
            names = ("fget", "fset", "func", "__func__")
            yield value, lambda: [getattr(value, name, None) for name in names]
        elif callable(value):
            for layer in layers(value):
                yield from self._of_layer(layer)
        elif isinstance(value, SimpleNamespace | argparse.Namespace) or not is_of_library(type(value)):
            yield from self._of_object(value)

    def _of_layer(self, layer: Any) -> Iterator[tuple[Any, Read]]:
        self.names.add(getattr(layer, "__name__", ""))
        if isinstance(layer, FunctionType):
            if not is_own_file(layer.__code__.co_filename):
                names = names_in(layer.__code__)
                self.names |= names
                self.numbers |= {each for each in layer.__code__.co_consts if isinstance(each, int)}
                yield layer, functools.partial(_of_function, layer, sorted(names))
                yield from _of_python_modules(layer.__globals__, names, set())
        elif isinstance(layer, functools.partial):
            yield layer, lambda: [layer.args, layer.keywords]
        elif isinstance(layer, MethodType):
            yield layer, lambda: [layer.__self__]
        elif not is_made_in_c(type(layer)):
            yield from self._of_object(layer)

    def _of_object(self, value: Any) -> Iterator[tuple[Any, Read]]:
        self._waiting.append(type(value))
        left_out = _OF_MODULES if isinstance(value, nn.Module) else frozenset()
        if isinstance(value, nn.Module) and id(value) not in self._inside:
            left_out = left_out - {"_modules", *HOOKS}
        slots: list[str] = []
        for cls in type(value).__mro__:
            named = vars(cls).get("__slots__", ())
            slots += [named] if isinstance(named, str) else list(named)
        yield value, functools.partial(_attributes, value, left_out, slots)


def _is_code(owner: Any, number: int, value: Any) -> bool:
    """Return True if a value that has changed is code, or a switch of code.

    What lists hold, and numbers of modules, may be state that every call changes.
    """
    if isinstance(value, bool):
        return not isinstance(owner, nn.Module | list | tuple | set)
    if isinstance(owner, FunctionType) and number < _OF_FUNCTIONS:
        return True
    return (callable(value) or isinstance(value, (CodeType, *_WRAPPERS))) and not isinstance(owner, list | tuple | set)


def _of_function(function: FunctionType, names: list[str]) -> list[Any]:
    """Return what a function is made of, what it closes over, and the globals that it names."""
    cells = map(_content, function.__closure__ or ())
    named = _named(function.__globals__, names)
    return [function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *named]


def _named(known: dict[str, Any], names: list[str]) -> list[Any]:
    return [known.get(name) for name in names]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has been deleted, or is not set yet
        return None


def _of_python_modules(known: dict[str, Any], names: frozenset[str], seen: set[int]) -> Iterator[tuple[Any, Read]]:
    """Yield third-party Python modules among named globals, with what the names are in them."""
    for name in names:
        found = known.get(name)
        if isinstance(found, ModuleType) and not is_of_library(found) and id(found) not in seen:
            seen.add(id(found))
            inner = names.intersection(vars(found))
            yield found, functools.partial(_named, vars(found), sorted(inner))
            yield from _of_python_modules(vars(found), inner, seen)


def _attributes(value: Any, left_out: frozenset[str], slots: list[str]) -> list[Any]:
    held = getattr(value, "__dict__", {})
    return [*(held[name] for name in list(held) if name not in left_out), *(getattr(value, s, None) for s in slots)]


def _members(value: Any) -> list[Any]:
    if len(value) > _MEMBERS:
        return [len(value)]
    return list(value.values() if isinstance(value, dict) else value)


def _kept(value: Any) -> Any:
    """Return a value to compare with later: once an object is gone, no other stands for it."""
    return weakref.ref(value) if type(value).__weakrefoffset__ and not isinstance(value, _SIMPLE) else value


def _differs(before: Any, value: Any) -> bool:
    """Return True if two values differ: simple ones by equality, and others by identity."""
    if isinstance(before, _SIMPLE):
        return type(before) is not type(value) or not bool(before == value)
    before = before() if isinstance(before, weakref.ref) else before
    return before is not value and before is not original(value)
