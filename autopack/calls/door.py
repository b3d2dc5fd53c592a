"""What a call of a model has to come by before its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class Door(ABC):
    """A forward pre-hook that no call may miss, although libraries call `model.forward(...)`."""

    @abstractmethod
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is done with a call: None, or its arguments."""

    @abstractmethod
    def is_past(self, module: nn.Module) -> bool:
        """Whether the forward of this module that begins now missed this hook; asked once in every forward."""
