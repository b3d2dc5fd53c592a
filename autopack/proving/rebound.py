"""Functions that somebody has put on a module, for the one that stands in for it: what they hold becomes the other's.

A forward of one's own around a model's commonly holds the forward that was there before, which is bound to the model.
Called for a twin it would run the model itself.
"""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopack.inspection.configs import text_config
from autopack.proving.twin import COPY_OF, NoTwin


def rebound(value: Any, module: nn.Module, stand_in: nn.Module) -> Any:
    """What is on a module, for the module that stands in for it.

    Raises `NoTwin` where it holds a part or a tensor of the module, for which nobody knows the stand-in's.
    """
    return _rebound(value, module, stand_in, {})


def _rebound(value: Any, module: nn.Module, stand_in: nn.Module, known: dict[int, Any]) -> Any:
    if value is module:
        return stand_in
    for one, other in _configs(module, stand_in):
        if value is one:
            return other
    if isinstance(value, MethodType):
        bound_to = _rebound(value.__self__, module, stand_in, known)
        return MethodType(_rebound(value.__func__, module, stand_in, known), bound_to)
    if isinstance(value, partial):
        held = [_rebound(part, module, stand_in, known) for part in (value.func, *value.args)]
        named = {name: _rebound(part, module, stand_in, known) for name, part in value.keywords.items()}
        return partial(held[0], *held[1:], **named)
    if isinstance(value, FunctionType) and value.__closure__:
        return _function(value, module, stand_in, known)
    if _is_part(value, module):
        raise NoTwin(f"what is on {type(module).__name__} holds a {type(value).__name__}, which is a part of it")
    return value


def _function(function: FunctionType, module: nn.Module, stand_in: nn.Module, known: dict[int, Any]) -> FunctionType:
    """A function with what it holds rebound; itself where that changes nothing."""
    if id(function) in known:
        return known[id(function)]
    cells = function.__closure__ or ()
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(CellType() for _ in cells),
    )
    known[id(function)] = copied  # it may hold itself
    changed = False
    for cell, new in zip(cells, copied.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        new.cell_contents = _rebound(held, module, stand_in, known)
        changed |= new.cell_contents is not held and new.cell_contents is not copied
    if not changed:
        known[id(function)] = function
        return function
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    copied.__dict__.update(function.__dict__)
    copied.__dict__[COPY_OF] = function
    return copied


def _is_part(value: Any, module: nn.Module) -> bool:
    if isinstance(value, nn.Module):
        return any(value is part for part in module.modules())
    if isinstance(value, torch.Tensor):
        return any(
            value is held
            for part in module.modules()
            for held in (*vars(part)["_parameters"].values(), *vars(part)["_buffers"].values())
        )
    return False


def _configs(module: nn.Module, stand_in: nn.Module) -> list[tuple[Any, Any]]:
    one, other = getattr(module, "config", None), getattr(stand_in, "config", None)
    return [] if one is None or other is None else [(one, other), (text_config(one), text_config(other))]
