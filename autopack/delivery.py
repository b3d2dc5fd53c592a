"""How a site learns the layout of its own forward, also when checkpointing recomputes it in backward.

The entry of an enabled model opens a *scope*; attention and rotary sites read it. The scope is bound into every
`_gradient_checkpointing_func`, so a recomputed layer sees the layout of the forward that it belongs to. A site that is
reached without its model's scope raises `OutsideForward`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from autopack.errors import OutsideForward, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

    from autopack.enabled import Enabled
    from autopack.layout import PackedLayout
    from autopack.padding import Padding
    from autopack.pairs import Pair
    from autopack.spreading import DocumentsAlone, PaddedDocuments

__all__ = [
    "ACROSS",
    "MARK",
    "BoundCheckpoint",
    "Scope",
    "bind_checkpointing",
    "close_scope",
    "current",
    "open_scope",
    "site_scope",
    "unbind_checkpointing",
    "without_layout",
]

MARK = "_autopack"
"""Name of the attribute by which a module knows the enabled model that it belongs to."""
ACROSS = "_autopack_across"
"""Name of the attribute that tells cross-attention: it reads what the encoder has made."""
_RECOMPUTED = -1
"""Level of a scope that no entry has opened."""


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
