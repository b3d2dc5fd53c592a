"""Gradient checkpointing: a layer that is recomputed in backward sees the documents of the forward it belongs to.

The scope of a forward is bound into every `_gradient_checkpointing_func` of an enabled model, and into the functions of
torch's checkpoint wrappers around its modules (`apply_activation_checkpointing`, which accelerate's FSDP plugin uses).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from autopack.errors import OutsideForward
from autopack.runtime.scope import Scope, ambient, in_force

_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of transformers' modules and of torch's wrappers; both take a function and its arguments."""


class _Rebound:
    """A checkpointed function that runs in the scope of the forward in which it was first called."""

    def __init__(self, function: Callable[..., Any], scope: Scope):
        self.function = function
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scope.model.active:
            raise OutsideForward(
                "autopack was disabled between a checkpointed forward and its backward, so the layers cannot be "
                "recomputed as they were. Disable after backward."
            )
        activation = ambient.activation
        if activation is not None and activation.scope is self.scope:
            return self.function(*args, **kwargs)  # in the forward itself; changing nothing lets Dynamo trace it
        # A recomputation has its own frame and may have its own thread.
        with in_force(self.scope):
            return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Checkpoint functions of others look at the layer whose method they get (`__self__`, LLaMA-Factory).
        if name == "function":
            raise AttributeError(name)
        return getattr(self.function, name)


def _rebound(function: Callable[..., Any], scope: Scope) -> Callable[..., Any]:
    """A function in a scope; a partial stays one, since checkpoint functions of others look at what it holds."""
    if isinstance(function, partial):
        return partial(_Rebound(function.func, scope), *function.args, **function.keywords)
    return _Rebound(function, scope)


class BoundCheckpoint:
    """A checkpoint function that carries the scope in force to the recomputation in backward."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        activation = ambient.activation
        bound = function if activation is None else _rebound(function, activation.scope)
        return self.function(bound, *args, **kwargs)


def bind_checkpointing(modules: list[nn.Module]) -> None:
    """Wrap every checkpoint function of `modules` that is not wrapped yet: one may have been set since."""
    for module in modules:
        for name in _FUNCTIONS:
            function = module.__dict__.get(name)
            if function is not None and not isinstance(function, BoundCheckpoint):
                module.__dict__[name] = BoundCheckpoint(function)


def unbind_checkpointing(modules: list[nn.Module]) -> None:
    """Put back every checkpoint function that `bind_checkpointing` wrapped."""
    for module in modules:
        for name in _FUNCTIONS:
            function = module.__dict__.get(name)
            if isinstance(function, BoundCheckpoint):
                module.__dict__[name] = function.function
