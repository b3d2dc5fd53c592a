"""Functions that somebody has put on a module, for the one that stands in for it: what they hold becomes the other's.

A forward of one's own around a model's commonly holds the forward that was there before, which is bound to the model.
Called for a twin it would run the model itself.
"""

from __future__ import annotations

from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
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
    if isinstance(value, FunctionType):
        return _function(value, module, stand_in, known)
    if _is_part(value, module):
        raise NoTwin(f"what is on {type(module).__name__} holds a {type(value).__name__}, which is a part of it")
    return value


def _function(function: FunctionType, module: nn.Module, stand_in: nn.Module, known: dict[int, Any]) -> FunctionType:
    """A function with what it holds (cells, defaults, names of its module) rebound; itself where nothing changes."""
    if id(function) in known:
        return known[id(function)]
    cells, held = function.__closure__ or (), function.__globals__
    copied = FunctionType(
        function.__code__,
        {**held},
        function.__name__,
        tuple(_rebound(value, module, stand_in, known) for value in function.__defaults__ or ()) or None,
        tuple(CellType() for _ in cells),
    )
    known[id(function)] = copied  # it may hold itself
    named = function.__kwdefaults__ or {}
    copied.__kwdefaults__ = {name: _rebound(value, module, stand_in, known) for name, value in named.items()} or None
    pairs = [*zip(function.__defaults__ or (), copied.__defaults__ or (), strict=True)]
    pairs += [(value, (copied.__kwdefaults__ or {})[name]) for name, value in named.items()]
    for cell, new in zip(cells, copied.__closure__ or (), strict=True):
        try:
            new.cell_contents = _rebound(cell.cell_contents, module, stand_in, known)
        except ValueError:  # not filled yet
            continue
        pairs.append((cell.cell_contents, new.cell_contents))
    for name in _names(function.__code__) & held.keys():
        value = held[name]
        # Functions of other modules are not followed: what they reach is no business of this model's.
        if not isinstance(value, FunctionType) or value.__globals__ is held:
            copied.__globals__[name] = _rebound(value, module, stand_in, known)
            pairs.append((value, copied.__globals__[name]))
    if all(new is old or new is copied for old, new in pairs):
        known[id(function)] = function
        return function
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    copied.__dict__.update(function.__dict__)
    copied.__dict__[COPY_OF] = function
    return copied


def _names(code: CodeType) -> set[str]:
    """The names that a function's code, and code inside it, may read of its module."""
    inside = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inside)


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
