"""Names that third-party code reads, so that a change behind one of them is noticed.

A user redefines a function in a notebook, reloads a module, or changes a number or a dictionary
entry beside it. The model that uses it is then another one, and nothing on the model itself shows
it.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from autopack.inspection.code_origin import (
    PLAIN,
    Place,
    is_made_in_c,
    is_of_autopack,
    is_of_library,
    is_own_file,
    layers,
    original,
)
from autopack.inspection.put_on import HOOKS
from autopack.inspection.source import names_in

_MOST = 2000
"""Most places and values that are compared at each call."""
_MEMBERS = 256
"""Size of a container above which only its length is compared."""
_BYTES = 4096
"""Bytes of a NumPy array above which only its identity is compared."""
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), numpy.generic)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module; compared elsewhere for modules inside the model."""
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")

Value = tuple[tuple[int, str], Callable[[], Any], Any]
"""An owner's identity and a name, a function that reads the value, and the value as read."""


class _Attribute:
    """One attribute of an object, as a mapping has it."""

    def __init__(self, owner: Any, name: str):
        self.owner, self._name = owner, name

    def get(self, name: str) -> Any:
        try:
            return getattr(self.owner, self._name, None)
        except ValueError:  # a variable of a closure that has been deleted
            return None


class _Identities(list[Any]):
    """Some objects, by identity, as weak references: once an object is gone, no other equals it."""

    def __init__(self, objects: Iterable[Any]):
        super().__init__(weakref.ref(each) if type(each).__weakrefoffset__ else each for each in objects)

    def __ne__(self, other: Any) -> bool:
        return any(map(operator.is_not, self, other))


class Followed:
    """The places of all code that third-party code reaches by name, and the values there.

    `places` hold code and switches, by identity. `values` are numbers, strings, lengths and the
    like, by equality. `names` are the words of all that code. A module `inside` the model is not
    opened where it is only mentioned.
    """

    def __init__(self, code: Iterable[Any], modules: Iterable[nn.Module], inside: Collection[nn.Module]):
        self.places: list[Place] = []
        self.values: list[Value] = []
        self.names: set[str] = set()
        self._inside = set(map(id, inside))
        self._seen: dict[Any, Any] = {}
        self._waiting: deque[Any] = deque()
        for roots in (code, modules):  # of many layers the code is one, so it comes first
            self._waiting += roots
            while self._waiting and len(self.places) + len(self.values) < _MOST:
                self._look_at(self._waiting.popleft())

    def _look_at(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # held, so that nothing else gets its identity
        if isinstance(value, type):
            self._members(value)
        elif isinstance(value, dict | list | tuple | set):
            self._container(value)
        elif isinstance(value, torch.Tensor | numpy.ndarray):
            self._array(value)
        elif isinstance(value, ModuleType) or is_of_autopack(value):
            return
        elif callable(value):
            for layer in layers(value):
                self.names.add(getattr(layer, "__name__", ""))
                if isinstance(layer, FunctionType):
                    self._function(layer)
                elif isinstance(layer, functools.partial):
                    self._waiting += [layer.args, layer.keywords]
                elif isinstance(layer, MethodType):
                    self._mention(layer.__self__)
                elif not is_made_in_c(type(layer)):
                    self._object(layer)
        elif isinstance(value, SimpleNamespace | argparse.Namespace) or not is_of_library(type(value)):
            self._object(value)

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        if is_own_file(code.co_filename):
            return
        for name in _OF_FUNCTIONS:
            self.places.append((_Attribute(function, name), name, getattr(function, name)))
        self._waiting += [function.__defaults__ or (), function.__kwdefaults__ or {}]
        names = names_in(code)
        self.names |= names
        self._named(function.__globals__, names)
        for cell in function.__closure__ or ():
            held = _Attribute(cell, "cell_contents")
            self._follow(held, "cell_contents", held.get("cell_contents"))

    def _named(self, known: dict[str, Any], names: frozenset[str]) -> None:
        """Follow the values of a Python module, and third-party modules in it, under some names."""
        for name in names:
            value = known.get(name)
            if name not in known:
                if hasattr(builtins, name):
                    self.places.append((known, name, None))
            elif not isinstance(value, ModuleType):
                self._follow(known, name, value)
            elif not is_of_library(value):
                self.places.append((known, name, value))
                if (id(value), names) not in self._seen:
                    self._seen[id(value), names] = value
                    self._named(vars(value), names.intersection(vars(value)))

    def _object(self, value: Any) -> None:
        """Follow the functions of an object's class, and the object's own attributes."""
        self._members(type(value))
        held = getattr(value, "__dict__", {})
        self._note_value(held, "its attributes", functools.partial(len, held))
        for name in list(held):
            if not (isinstance(value, nn.Module) and name in _OF_MODULES):
                self._follow(held, name, held[name], switches=not isinstance(value, nn.Module))
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                self._follow(_Attribute(value, name), name, getattr(value, name, None))
        if isinstance(value, nn.Module) and id(value) not in self._inside:
            self._waiting += [vars(value)[name] for name in ("_modules", *HOOKS)]

    def _members(self, cls: type) -> None:
        metaclass: type = type(cls)
        bases = [base for base in (*cls.__mro__, *metaclass.__mro__) if not is_of_library(base)]
        for base in bases:
            self._note_value(base, "its members", functools.partial(len, vars(base)))
            for name, value in vars(base).items():
                if isinstance(value, property | functools.cached_property | staticmethod | classmethod):
                    self.places.append((vars(base), name, value))
                    parts = ("fget", "fset", "func", "__func__")
                    self._waiting += [part for each in parts if (part := getattr(value, each, None)) is not None]
                elif name not in PLAIN and (callable(value) or not name.startswith("__")):
                    self._follow(vars(base), name, value)

    def _container(self, value: Any) -> None:
        self._note_value(value, "its length", lambda: len(value))
        if len(value) > _MEMBERS:
            return
        if isinstance(value, dict):
            for name in list(value):
                self._follow(value, name, value[name])
        else:
            if not isinstance(value, tuple):
                self._note_value(value, "its members", lambda: _Identities(value))
            members = list(value)
            self._seen[id(members)] = members
            for member in members:
                self._mention(member)

    def _array(self, value: Any) -> None:
        if isinstance(value, numpy.ndarray):
            if value.nbytes <= _BYTES:
                self._note_value(value, "its numbers", value.tobytes)
        elif not value.requires_grad and not value.is_inference():  # what is trained changes at every step
            self._note_value(value, "its version", lambda: value._version)

    def _follow(self, mapping: Any, name: Any, value: Any, switches: bool = True) -> None:
        """Note a value's place, and follow it: code and `switches` as code, others as values."""
        if callable(value) or (switches and isinstance(value, bool)):
            self.places.append((mapping, name, original(mapping.get(name))))
        elif isinstance(value, _SIMPLE):
            self._note_value(mapping, name, lambda: mapping.get(name))
            return
        else:
            self._note_value(mapping, name, lambda: _Identities([mapping.get(name)]))
        self._mention(value)

    def _mention(self, value: Any) -> None:
        if id(value) not in self._inside and not isinstance(value, _SIMPLE):
            self._waiting.append(value)

    def _note_value(self, owner: Any, name: Any, read: Callable[[], Any]) -> None:
        key = id(owner.owner if isinstance(owner, _Attribute) else owner), str(name)
        self.values.append((key, read, read()))
