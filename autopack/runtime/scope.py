"""How a site learns the layout of its own forward, also when checkpointing recomputes it in backward.

The entry of an enabled model opens a *scope*; attention and rotary sites read it. The scope is bound into every
`_gradient_checkpointing_func`, so a recomputed layer sees the layout of the forward that it belongs to. A site that is
reached without its model's scope raises `OutsideForward`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch

from autopack.errors import OutsideForward, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

    from autopack.calls.documents import DocumentsAlone, PaddedDocuments
    from autopack.layout.packed import PackedLayout
    from autopack.layout.padding import Padding
    from autopack.layout.pair import Pair
    from autopack.runtime.model import Enabled
from autopack.runtime.marks import MARK


class Scope:
    """One forward of one enabled model: its layout (None for an unpacked call) and what else its sites need.

    `level` is that of the entry that opened it, as in `Enabled.entries`: 0 for the whole model, 1 for its backbone.
    """

    def __init__(
        self,
        owner: Enabled,
        layout: PackedLayout | None,
        outer: Scope | None,
        level: int,
        want_weights: bool = False,
        padding: Padding | None = None,
        waits: bool = False,
        pair: Pair | None = None,
        memory: PackedLayout | None = None,
        documents: PaddedDocuments | DocumentsAlone | None = None,
    ):
        self.owner = owner
        self.layout = layout
        self.pair = pair
        """Both halves of the call of an encoder-decoder; each half has a scope of its own, with its layout."""
        self.memory = memory
        """The layout of the encoder's states in a decoder: document i of `layout` reads document i of it."""
        self.outer = outer
        self.want_weights = want_weights
        self.padding = padding
        """The padded batch that runs as this packed row, if one does; the exit restores its form."""
        self.waits = waits
        """Whether this is a padded batch that an entry further in may unpad."""
        self.documents = documents
        """The documents of packed rows that a head with one result per row gets as its rows, where it does."""
        self.level = level
        self.levels: tuple[int, ...] = (level,)
        """Levels of the entries that are being passed now, the outermost first."""
        self.deepest = level
        """The deepest level that has been entered, whether or not it has been left."""
        self.frame: FrameType | None = _calling_frame()

    def enter(self, level: int) -> None:
        """Pass an entry further in: all is done, only its exit has to be told from that of the scope."""
        self.levels = (*self.levels, level)
        self.deepest = max(self.deepest, level)


def _calling_frame() -> FrameType | None:
    """The frame that runs the forward: the innermost one that belongs neither to autopack nor to Dynamo."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("autopack.", "torch._dynamo.")):
        frame = frame.f_back
    return frame


def _running(wanted: FrameType | None) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


class _Ambient(threading.local):
    # A thread-local and not a ContextVar: torch.compile cannot trace ContextVar.get.
    scope: Scope | None = None


_ambient = _Ambient()


def current() -> Scope | None:
    """The innermost scope of this thread whose forward is running, or None.

    Exit hooks are skipped by a KeyboardInterrupt, and inside compiled code by any exception. What such a forward leaves
    behind is dropped here: its frame is no longer on the stack.
    """
    scope = _ambient.scope
    if torch.compiler.is_compiling():
        return scope  # frames cannot be traced
    while scope is not None and not _running(scope.frame):
        _ambient.scope = scope = scope.outer
    return scope


def open_scope(scope: Scope) -> None:
    """Make `scope` the current one of this thread."""
    _ambient.scope = scope


def close_scope(owner: Enabled, level: int) -> Scope | None:
    """Leave the entry of `level` of the current scope; leaving the first restores the scope that was current before.

    Returns the scope if it was closed.
    """
    scope = _ambient.scope
    if scope is None or scope.owner is not owner or scope.levels[-1:] != (level,):
        return None  # an entry that raised has opened nothing
    scope.levels = scope.levels[:-1]
    if scope.levels:
        return None
    scope.frame = None
    _ambient.scope = scope.outer
    return scope


@contextmanager
def without_layout() -> Iterator[None]:
    """Run a part of the forward that is under way as if it were not packed."""
    outer = _ambient.scope
    assert outer is not None
    inner = Scope(outer.owner, None, outer, outer.level, outer.want_weights)
    inner.frame = outer.frame  # this function's own caller is about to return
    _ambient.scope = inner
    try:
        yield
    finally:
        _ambient.scope = outer


def site_scope(module: nn.Module) -> Scope | None:
    """The scope of the forward that `module` runs in, or None where the module belongs to no enabled model.

    Raises `OutsideForward` for a module of an enabled model that is reached with no scope or with another model's.
    """
    owner = module.__dict__.get(MARK)
    if owner is None:
        return None
    scope = current()
    if scope is None or scope.owner is not owner:
        raise OutsideForward(
            f"{type(module).__name__} belongs to a model that autopack enabled, but it was reached without passing "
            f"that model's entry, so its documents are unknown. Call the model itself (`model(...)`, not "
            f"`model.forward(...)` or one of its layers); for gradient checkpointing use "
            f"`model.gradient_checkpointing_enable()`, since other checkpoint wrappers do not carry the layout into "
            f"backward; or call `autopack.disable(model)` first."
        )
    if scope.layout is None and scope.pair is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} mixes tokens outside the encoder and the decoder of a packed call, where "
            f"autopack does not know its documents. Train the model on padded batches, with "
            f"autopack.enable(model, unpad='never')."
        )
    return scope
