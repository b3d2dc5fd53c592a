"""Third-party functions on a module, copied for its stand-in with what they hold of it replaced.

A trainer's forward around a model's commonly holds the earlier forward, which is bound to the
model. Called for a twin it would run the model itself.
"""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from autopack.inspection.configs import text_config
from autopack.inspection.source import names_in
from autopack.proving.twin import NoTwin


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """Return an object on a module, rebound to the module that stands in for it.

    Raises `NoTwin` if it holds a part or a tensor of the module, whose counterpart is unknown, or
    names the module as a global (in a notebook): it would run the model itself.
    """
    known: dict[int, Any] = {id(module): stand_in}
    one, other = getattr(module, "config", None), getattr(stand_in, "config", None)
    if one is not None and other is not None:
        known |= {id(one): other, id(text_config(one)): text_config(other)}
    parts = set(map(id, (*module.modules(), *module.parameters(), *module.buffers())))

    def of(value: Any) -> Any:
        if id(value) in known:
            return known[id(value)]
        if id(value) in parts:
            held = type(value).__name__
            raise NoTwin(
                f"what is on {type(module).__name__} holds a {held}, which is a part of it"
            )
        if isinstance(value, MethodType):
            return MethodType(of(value.__func__), of(value.__self__))
        if isinstance(value, partial):
            named = {name: of(part) for name, part in value.keywords.items()}
            return partial(of(value.func), *map(of, value.args), **named)
        return copied(value) if isinstance(value, FunctionType) else value

    def copied(function: FunctionType) -> FunctionType:
        for name in names_in(function.__code__) & function.__globals__.keys():
            if id(function.__globals__[name]) in parts:
                raise NoTwin(
                    f"what is on {type(module).__name__} names a part of it as the global {name}"
                )
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(of(part) is not part for part in given):
            raise NoTwin(f"what is on {type(module).__name__} has a part of it as a default")
        if not function.__closure__:
            return function
        closed = function.__closure__
        # one may not be filled yet
        cells = [cell if cell == CellType() else CellType() for cell in closed]
        held = function.__code__, function.__globals__, function.__name__
        found = FunctionType(*held, function.__defaults__, tuple(cells))
        known[id(function)] = found  # it may hold itself
        found.__kwdefaults__ = function.__kwdefaults__
        found.__dict__.update(function.__dict__)
        for cell, new in zip(closed, cells, strict=True):
            if new is not cell:
                new.cell_contents = of(cell.cell_contents)
        return found

    return of(value)
