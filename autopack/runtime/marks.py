"""Marks, by which a module that mixes tokens knows the enabled model that it is a part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopack.family import Way
from autopack.runtime.model import EnabledModel, Link

MARK = "_autopack"  # name of the attribute by which a module that mixes tokens knows its mark
ENABLED = "_autopack_enabled"  # name of the attribute of a model that holds what it is enabled as


@dataclass(frozen=True, eq=False)
class Mark:
    """Facts that a site needs about a module: its enabled model, and its treatment in calls."""

    link: Link  # reference to the enabled model that it is a part of
    way: Way | None = None  # how it is kept within documents, where it is a mixer
    adjustment: Callable[..., Any] | None = None
    """A function of its queries, keys and values, if it is attention that needs one."""
    mixes: bool = True
    """True if it mixes tokens of documents.

    A part that takes no tokens (a vision tower) does not, nor does attention within each token or
    media.
    """
    # whether it is cross-attention, which reads what the encoder has made
    reads_encoder: bool = False
    reads_images: bool = False  # whether it is attention from text to images

    @property
    def model(self) -> EnabledModel | None:
        """The enabled model that the module is a part of; None in a copy of only a part of it."""
        return self.link.model


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark of a module, or None if it has none."""
    return module.__dict__.get(MARK)


def is_severed(module: nn.Module) -> bool:
    """Return True if a module has a mark, but is a copied part that belongs to no enabled model."""
    mark = mark_of(module)
    return mark is not None and mark.model is None


def holds_marks(model: nn.Module) -> bool:
    """Return True if a module in this model has a mark."""
    return any(MARK in module.__dict__ for module in model.modules())


def enabled_in(model: nn.Module) -> EnabledModel | None:
    """Return the `EnabledModel` of the first mark in this model; None if unmarked or severed."""
    marks = (mark_of(module) for module in model.modules())
    return next((mark.model for mark in marks if mark is not None), None)


def enabled_at(model: nn.Module) -> EnabledModel | None:
    """Return the `EnabledModel` of a model that was enabled itself; None for any other."""
    return model.__dict__.get(ENABLED)
