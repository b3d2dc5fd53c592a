"""Third-party functions on a module, copied for its stand-in with what they close over replaced.

A trainer's forward around a model's commonly holds the earlier forward, which is bound to the
model. Called for a twin it would run the model itself.
"""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from autopack.inspection.configs import text_config
from autopack.proving.twin import NoTwin


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """Return an object on a module, rebound to the module that stands in for it.

    Raises `NoTwin` if it closes over a part or a tensor of the module, whose counterpart is
    unknown. Globals that a function names stay as they are.
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
            raise NoTwin(f"what is on {type(module).__name__} holds a {held}, which is a part of it")
        if isinstance(value, MethodType):
            return MethodType(of(value.__func__), of(value.__self__))
        if isinstance(value, partial):
            named = {name: of(part) for name, part in value.keywords.items()}
            return partial(of(value.func), *map(of, value.args), **named)
        return copied(value) if isinstance(value, FunctionType) and value.__closure__ else value

    def copied(function: FunctionType) -> FunctionType:
        closed = function.__closure__ or ()
        cells = [cell if cell == CellType() else CellType() for cell in closed]  # one may not be filled yet
        given = function.__name__, function.__defaults__, tuple(cells)
        found = FunctionType(function.__code__, function.__globals__, *given)
        known[id(function)] = found  # it may hold itself
        found.__kwdefaults__ = function.__kwdefaults__
        found.__dict__.update(function.__dict__)
        for cell, new in zip(closed, cells, strict=True):
            if new is not cell:
                new.cell_contents = of(cell.cell_contents)
        return found

    return of(value)
