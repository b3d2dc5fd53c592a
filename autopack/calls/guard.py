"""A forward pre-hook that a direct call of `model.forward(...)` must not skip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class ForwardGuard(ABC):
    """A forward pre-hook that also has to see calls of `model.forward(...)`, which go past hooks."""

    @abstractmethod
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call: None leaves its arguments as they are; otherwise those that the forward gets."""

    @abstractmethod
    def is_past(self, module: nn.Module) -> bool:
        """Whether the forward that begins now was called without this hook; asked once in every forward."""
