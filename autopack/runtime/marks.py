"""What autopack notes on modules: whose attention module or mixer one is, and which handle a model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopack.family import Way
from autopack.runtime.model import EnabledModel, Link

MARK = "_autopack"
"""Name of the attribute by which a module that mixes tokens knows its mark."""
HANDLE = "_autopack_handle"
"""Name of the attribute by which an enabled model knows its handle."""


@dataclass(frozen=True, eq=False)
class Mark:
    """What a module that mixes tokens has to know when it is called."""

    link: Link
    """The way to the enabled model that it is a part of."""
    way: Way | None = None
    """How it is kept within documents, where it is a mixer."""
    adjustment: Callable[..., Any] | None = None
    """What is done to its queries, keys and values, where it is attention that needs it."""
    mixes: bool = True
    """Whether it mixes tokens of documents; no part that takes no tokens (a vision tower) does, and no attention within
    each token or within media."""
    reads_encoder: bool = False
    """Whether it is cross-attention, which reads what the encoder has made."""
    reads_images: bool = False
    """Whether it is attention from text to images."""

    @property
    def model(self) -> EnabledModel | None:
        """The enabled model that it is a part of; None in a copy of a part of one."""
        return self.link.model


def mark_of(module: nn.Module) -> Mark | None:
    """The mark of a module; None for one that belongs to no enabled model or mixes no tokens."""
    return module.__dict__.get(MARK)


def is_severed(module: nn.Module) -> bool:
    """Whether a module has a mark of an enabled model that it is no longer a part of."""
    mark = mark_of(module)
    return mark is not None and mark.model is None


def holds_marks(model: nn.Module) -> bool:
    """Whether a module of this model belongs to an enabled model."""
    return any(MARK in module.__dict__ for module in model.modules())


def enabled_in(model: nn.Module) -> EnabledModel | None:
    """The enabled model that parts of this model belong to, or None."""
    marks = (mark_of(module) for module in model.modules())
    return next((mark.model for mark in marks if mark is not None), None)


def handle_of(model: nn.Module) -> Any:
    """The handle of an enabled model, or None."""
    return model.__dict__.get(HANDLE)
