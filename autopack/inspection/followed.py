"""What somebody else's functions call, as far as it can be found by name, so that a change of it is noticed.

A function of a notebook or of a script is defined anew, its module is loaded again, a switch beside it is thrown: the
model that it is a part of is another one then, and nothing on the model itself shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from autopack.inspection.code_origin import Place, file_of, is_of_autopack, is_own_file, is_standard, layers, original
from autopack.inspection.source import names_in

_MOST = 2000
"""Places that are looked at again at each call."""


class _Attribute:
    """One attribute of an object, as a mapping has it."""

    def __init__(self, owner: Any, name: str):
        self._owner, self._name = owner, name

    def get(self, name: str) -> Any:
        try:
            return getattr(self._owner, self._name, None)
        except ValueError:  # a variable of a closure that has been deleted
            return None


class Followed:
    """The places of all that some functions call and that is not code of a library known here, and of its code."""

    def __init__(self, roots: Iterable[Any]):
        self.places: list[Place] = []
        self._seen: set[int] = set()
        self._waiting = list(roots)
        while self._waiting and len(self.places) < _MOST:
            self._look_at(self._waiting.pop())

    def _look_at(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, type):
            self._members(value)
        elif isinstance(value, ModuleType) or not callable(value) or is_of_autopack(value):
            return
        else:
            for layer in layers(value):
                if isinstance(layer, FunctionType):
                    self._function(layer)
                elif not isinstance(layer, MethodType) and type(layer).__module__ not in ("builtins", "functools"):
                    self._object(layer)

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        if is_own_file(code.co_filename):
            return
        self._note(_Attribute(function, "__code__"), "__code__", code)
        self._note(_Attribute(function, "__defaults__"), "__defaults__", function.__defaults__)
        names, known = names_in(code), function.__globals__
        for name in names:
            if name in known:
                self._named(known, name, names)
        for cell in function.__closure__ or ():
            held = _Attribute(cell, "cell_contents")
            self._follow(held, "cell_contents", held.get("cell_contents"))

    def _named(self, known: dict[str, Any], name: str, names: Iterable[str]) -> None:
        value = known[name]
        if isinstance(value, ModuleType):
            if not _is_of_library(value):
                self._note(known, name, value)
                for inner in names:
                    if inner in vars(value) and not isinstance(vars(value)[inner], ModuleType):
                        self._named(vars(value), inner, ())
        else:
            self._follow(known, name, value)

    def _object(self, value: Any) -> None:
        """An object that is called: the functions of its class, and those that it holds itself."""
        self._members(type(value))
        held = getattr(value, "__dict__", {})
        for name in list(held):
            self._follow(held, name, held[name])

    def _members(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_of_library(base):
                continue
            for name, value in vars(base).items():
                if name.startswith("__") and name not in ("__call__", "__init__", "__getattr__", "__getattribute__"):
                    continue
                self._follow(vars(base), name, getattr(value, "__func__", value))

    def _follow(self, mapping: Any, name: str, value: Any) -> None:
        """Note where a function, a class, an object that can be called or a switch stands, and what it calls."""
        if isinstance(value, bool) or callable(value):
            self._note(mapping, name, original(mapping.get(name)))
            self._waiting.append(value)

    def _note(self, mapping: Any, name: str, value: Any) -> None:
        self.places.append((mapping, name, value))


def _is_of_library(value: Any) -> bool:
    """Whether a module or class is one of the libraries that are known here, or of the standard library."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    file = file_of(name)
    return name in sys.builtin_module_names or (file is not None and (is_own_file(file) or is_standard(file)))
