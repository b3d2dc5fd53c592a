"""The replacement at models' forwards: it makes `model.forward(...)` the same as `model(...)`.

Libraries call `forward` (sentence-transformers, PEFT's tuners), past the hooks by which a call
enters an enabled model.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopack.patching import Site


class ForwardGuard(ABC):
    """A forward pre-hook that also sees calls of `model.forward(...)`, which go past hooks."""

    @abstractmethod
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call; return None to keep its arguments, or the forward's new ones."""

    @abstractmethod
    def is_past(self, module: nn.Module) -> bool:
        """Return True if this forward began without this hook; called once in every forward."""


def adapt_forward(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a model's forward that calls the model if it was reached past the entry."""

    @functools.wraps(original, updated=())
    def autopack_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_past_entry(self, autopack_forward):
            return original(self, *args, **kwargs)
        return self(*args, **kwargs)

    return autopack_forward


def _is_past_entry(module: nn.Module, forward: Any) -> bool:
    """Return True if this forward was called directly, and is all that a call would run.

    A forward of a subclass, or on the instance, that calls this one would run twice; the sites that
    it reaches raise.
    """
    doors = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ForwardGuard)]
    is_past = [door.is_past(module) for door in doors]  # all of them: one that was passed forgets it here
    return any(is_past) and "forward" not in vars(module) and type(module).forward is forward
