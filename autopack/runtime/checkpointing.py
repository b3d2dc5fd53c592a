"""Gradient checkpointing: a layer that is recomputed in backward sees the layout of the forward that it belongs to.

The scope is bound into every `_gradient_checkpointing_func` of an enabled model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autopack.errors import OutsideForward

if TYPE_CHECKING:
    from torch import nn

from autopack.runtime.scope import Scope, _ambient

_RECOMPUTED = -1
"""Level of a scope that no entry has opened."""


class _Rebound:
    """A checkpointed function that runs in the scope of the forward in which it was first called."""

    def __init__(self, function: Callable[..., Any], scope: Scope):
        self.function = function
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scope.owner.active:
            raise OutsideForward(
                "autopack was disabled between a checkpointed forward and its backward, so the layers cannot be "
                "recomputed as they were. Disable after backward."
            )
        if _ambient.scope is self.scope:
            return self.function(*args, **kwargs)  # in the forward itself; changing nothing lets Dynamo trace it
        # A scope of its own, for a recomputation has its own frame and may have its own thread.
        before = _ambient.scope
        scope = self.scope
        _ambient.scope = Scope(scope.owner, scope.layout, before, _RECOMPUTED, scope.want_weights, memory=scope.memory)
        try:
            return self.function(*args, **kwargs)
        finally:
            _ambient.scope = before


class BoundCheckpoint:
    """A `_gradient_checkpointing_func` that carries the current scope to the recomputation in backward."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = _ambient.scope
        return self.function(function if scope is None else _Rebound(function, scope), *args, **kwargs)


def bind_checkpointing(modules: list[nn.Module]) -> None:
    """Wrap every checkpoint function of `modules` that is not wrapped yet: one may have been set since."""
    for module in modules:
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, BoundCheckpoint):
            module.__dict__["_gradient_checkpointing_func"] = BoundCheckpoint(function)


def unbind_checkpointing(modules: list[nn.Module]) -> None:
    """Put back every checkpoint function that `bind_checkpointing` wrapped."""
    for module in modules:
        function = module.__dict__.get("_gradient_checkpointing_func")
        if isinstance(function, BoundCheckpoint):
            module.__dict__["_gradient_checkpointing_func"] = function.function
