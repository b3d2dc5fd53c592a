"""Third-party functions on a module, copied for its stand-in with references to it replaced.

A user's forward around a model's commonly holds the earlier forward, which is bound to the model.
Called for a twin it would run the model itself.
"""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from autopack.inspection.configs import text_config
from autopack.inspection.source import names_in
from autopack.proving.twin import COPY_OF, NoTwin


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """Return an object on a module, rebound to the module that stands in for it.

    Raises `NoTwin` if it holds a part or a tensor of the module whose counterpart in the stand-in
    is unknown.
    """
    return _Rebinding(module, stand_in).of(value)


class _Rebinding:
    """The stand-ins of a module and its configurations, and the functions rebound so far."""

    def __init__(self, module: nn.Module, stand_in: nn.Module):
        self._module = module
        self._pairs: list[tuple[Any, Any]] = [(module, stand_in)]
        one, other = getattr(module, "config", None), getattr(stand_in, "config", None)
        if one is not None and other is not None:
            self._pairs += [(one, other), (text_config(one), text_config(other))]
        parts = list(module.modules())
        tensors = [tensor for part in parts for held in (part._parameters, part._buffers) for tensor in held.values()]
        self._parts = {id(part) for part in (*parts, *tensors) if part is not None}
        self._known: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        for one, other in self._pairs:
            if value is one:
                return other
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            named = {name: self.of(part) for name, part in value.keywords.items()}
            return partial(self.of(value.func), *map(self.of, value.args), **named)
        if isinstance(value, FunctionType):
            return self._function(value)
        if id(value) in self._parts:
            kind = type(self._module).__name__
            raise NoTwin(f"what is on {kind} holds a {type(value).__name__}, which is a part of it")
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        """Return a function with its references to the module rebound; itself if there are none."""
        if id(function) in self._known:
            return self._known[id(function)]
        cells, held = function.__closure__ or (), function.__globals__
        defaults = tuple(map(self.of, function.__defaults__ or ()))
        empty = tuple(CellType() for _ in cells)
        copied = FunctionType(function.__code__, {**held}, function.__name__, defaults or None, empty)
        self._known[id(function)] = copied  # it may hold itself
        named = function.__kwdefaults__ or {}
        copied.__kwdefaults__ = {name: self.of(value) for name, value in named.items()} or None
        pairs = [*zip(function.__defaults__ or (), defaults, strict=True)]
        pairs += [(value, (copied.__kwdefaults__ or {})[name]) for name, value in named.items()]
        for cell, new in zip(cells, empty, strict=True):
            try:
                new.cell_contents = self.of(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
            pairs.append((cell.cell_contents, new.cell_contents))
        for name in names_in(function.__code__) & held.keys():
            value = held[name]
            # Functions of other modules are not followed: what they reach is no business of this model's.
            if not isinstance(value, FunctionType) or value.__globals__ is held:
                copied.__globals__[name] = self.of(value)
                pairs.append((value, copied.__globals__[name]))
        if all(new is old or new is copied for old, new in pairs):
            self._known[id(function)] = function
            return function
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        copied.__dict__.update(function.__dict__)
        copied.__dict__[COPY_OF] = function
        return copied
