"""Scopes, by which attention, masks and mixers learn the documents of the forward that they run in.

The entry of an enabled model puts a *scope* in force for its forward; sites read it. A module that
mixes tokens has a *mark* that names its enabled model: without that model's scope, its site raises
`OutsideForward`.

A layer that gradient checkpointing recomputes in backward sees the documents of the forward it
belongs to. The scope of a forward is bound into every `_gradient_checkpointing_func` of an enabled
model, and into the functions of torch's checkpoint wrappers around its modules
(`apply_activation_checkpointing`, which accelerate's FSDP plugin uses).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from autopack.errors import OutsideForward, UnsupportedModel
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes
from autopack.layout.prepared import SeenImages
from autopack.runtime.marks import MARK, Mark
from autopack.runtime.model import EnabledModel, why_severed
from autopack.runtime.row_group import RowGroup

NO_ENTRY = -1  # level of an activation that no entry has opened


@dataclass(frozen=True, eq=False)
class Scope:
    """The facts about one forward of one enabled model that sites may read."""

    model: EnabledModel
    layout: PackedLayout | None = None  # its documents; None for a call that packs nothing
    memory: PackedLayout | None = None
    """The layout of the encoder's states, in a decoder: document i of `layout` reads its i-th."""
    images: SeenImages | None = None  # which images each document reads, across
    want_weights: bool = False  # whether attention weights are asked for
    as_batch: bool = False
    """True if documents are rows of a batch with its longest row's values (dynamic rope)."""
    stock: bool = False  # whether the model runs as it would without autopack
    refusal: str | None = None
    """The reason why nothing in this forward may mix tokens, behind a class's name, or None."""
    shared: RowGroup | None = None
    """The processes that share the rows of `layout`, if each has a part of their columns."""
    prefixes: Prefixes | None = None
    """The common beginnings of `layout`'s documents, if the row that runs holds them once."""
    in_step: bool = False
    """True if all ranks run this module equally often (`autopack.runtime.runs`)."""
    agreed: dict[int, int] = field(default_factory=dict)
    """Agreed numbers of runs, by the module's identity: a recomputation makes as many."""

    @property
    def ran(self) -> tuple[int, int]:
        """Rows and columns that modules get: all, a rank's part, or one row with prefixes once."""
        assert self.layout is not None
        if self.shared is not None:
            return self.layout.rows, self.layout.columns // self.shared.ranks
        return self.layout.shape if self.prefixes is None else (1, self.prefixes.tokens)

    def refused(self, why: str) -> UnsupportedModel:
        """Return the error for `why` a module cannot run on shared rows or rows with prefixes."""
        if self.shared is not None:
            return UnsupportedModel(
                f"{why}, where each rank has a part of every row. Train it without "
                "sequence_parallel.",
                code="sequence-parallel",
            )
        return UnsupportedModel(
            f"{why}, in a row that holds once what rows of the batch begin with. Use "
            "autopack.enable(model, share=False).",
            code="share-refused",
        )


class Activation:
    """A scope in force, from the entry that put it in force to the exit that ends it."""

    def __init__(
        self,
        scope: Scope,
        outer: Activation | None,
        level: int,
        plan: Any = None,
        frame: FrameType | None = None,
    ):
        self.scope = scope
        self.outer = outer  # what was in force before, and will be again
        self.plan = plan
        """The entry's plan of the call (a `CallPlan`); None in a recomputation."""
        # place of that entry among the entries of the model; `NO_ENTRY` in a recomputation
        self.level = level
        # levels of the entries that are being passed now, the outermost first
        self.passed: tuple[int, ...] = (level,)
        # the deepest level that has been entered, whether or not it has been left
        self.deepest = level
        # whether its code is a third party's
        self.foreign = plan is not None and plan.call.entry.foreign is not None
        # the layouts of packed rows that were declared further in alone
        self.inside: list[PackedLayout] = []
        # whether labels have come to the site of the loss (`autopack.calls.met_inside`)
        self.met_loss = False
        self.arrived: set[Mark] = set()  # the marks of the modules that have reached their sites
        self.mixing: tuple[PackedLayout, set[str]] | None = None
        """The layout of the mixer that runs now at its operations, and those that it has called."""
        self.pooled = False  # whether a pooler was handed rows of its own
        self.masked = False  # whether logits of starts and ends were taken out at padding
        self.apart = False  # whether common beginnings run once per document after all
        self.volume: Any = None if plan is None else plan.volume  # what of the call is counted here
        self.packed_inside = False  # whether an entry further in packs or unpads the call
        self.frame = frame or _calling_frame()

    @property
    def layouts(self) -> list[PackedLayout]:
        """The layouts of the packed rows that have run in this forward."""
        return self.inside if self.scope.layout is None else [self.scope.layout]

    def enter(self, level: int) -> None:
        """Note the start of the inner entry at `level`, whose exit must not end this activation."""
        self.passed = (*self.passed, level)
        self.deepest = max(self.deepest, level)


_HELPERS = ("autopack.", "torch._dynamo.", "contextlib")


def _calling_frame() -> FrameType | None:
    """Return the innermost frame outside autopack, Dynamo and contextlib: the forward's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HELPERS):
        frame = frame.f_back
    return frame


class Ambient(threading.local):
    """The innermost activation of each thread."""

    # A thread-local and not a ContextVar: torch.compile cannot trace ContextVar.get. It is set for
    # every thread, so that no graph depends on whether it has been.
    __slots__ = ()  # without them Dynamo of torch 2.4 takes what it reads here for a class

    def __init__(self) -> None:
        self.activation: Activation | None = None


ambient = Ambient()


def current() -> Activation | None:
    """Return this thread's innermost activation, or None; first drop those whose forwards ended.

    Exit hooks are skipped by a KeyboardInterrupt, and inside compiled code by any exception. The
    activation of such a forward is dropped here: its frame is no longer on the stack.
    """
    activation = ambient.activation
    if torch.compiler.is_compiling():
        return activation  # frames cannot be traced
    while activation is not None:
        try:
            if activation.frame is not None:
                activation.frame.clear()
        except RuntimeError:  # a frame that runs refuses to be cleared
            break
        ambient.activation = activation = activation.outer
    return activation


def running_scope() -> Scope | None:
    """Return the scope of the innermost forward that is running in this thread, or None."""
    activation = current()
    return None if activation is None else activation.scope


def of_model(model: EnabledModel) -> Activation | None:
    """Return this thread's innermost activation if it is of this model; else None."""
    activation = None if ambient.activation is None else current()
    return activation if activation is not None and activation.scope.model is model else None


def close(model: EnabledModel, level: int) -> Activation | None:
    """Leave the entry at `level`; end and return the activation if that opened it, else None."""
    activation = ambient.activation
    if (
        activation is None
        or activation.scope.model is not model
        or activation.passed[-1:] != (level,)
    ):
        return None  # an entry that raised has put nothing in force
    activation.passed = activation.passed[:-1]
    if activation.passed:
        return None
    activation.frame = None
    ambient.activation = activation.outer
    return activation


@contextmanager
def in_force(scope: Scope, level: int = NO_ENTRY, frame: FrameType | None = None) -> Iterator[None]:
    """Put a scope in force in this block, without an entry, for the forward that `frame` runs.

    By default that is the caller's.
    """
    outer = ambient.activation
    ambient.activation = Activation(scope, outer, level, frame=frame)
    try:
        yield
    finally:
        ambient.activation = outer


@contextmanager
def stock(model: EnabledModel) -> Iterator[None]:
    """Run an enabled model in this block as if autopack were not there."""
    with in_force(Scope(model, stock=True)):
        yield


@contextmanager
def changed(**fields: Any) -> Iterator[None]:
    """Replace `fields` of the scope in force, in this block; a forward must be running."""
    outer = ambient.activation
    assert outer is not None
    # In the frame of the forward, for the caller of this function is about to return.
    with in_force(replace(outer.scope, **fields), outer.level, outer.frame):
        yield


def without_layout() -> AbstractContextManager[None]:
    """Take the documents out of the scope in force, in this block; a forward must be running."""
    return changed(layout=None, memory=None)


def site_scope(module: nn.Module, one_token: bool = False) -> Scope | None:
    """Return `module`'s scope; None if it has no mark or mixes nothing; raise if it is in none.

    Raises `OutsideForward` for a module of an enabled model that is reached with no scope or with
    another model's, and `UnsupportedModel` where the scope lets nothing mix. With `one_token` the
    module has one token per row, which needs no scope: two documents would be two tokens.
    """
    mark = module.__dict__.get(MARK)
    if mark is None or not mark.mixes:
        return None
    activation, model = current(), mark.link.model
    if activation is None and one_token and model is not None:
        return None
    if activation is None or activation.scope.model is not model:
        raise _outside(module, mark)
    scope = activation.scope
    if scope.refusal is not None:
        raise UnsupportedModel(f"{type(module).__name__} {scope.refusal}", code="unpad-refused")
    if scope.layout is not None and not torch.compiler.is_compiling():
        activation.arrived.add(mark)
    return scope


def _outside(module: nn.Module, mark: Mark) -> OutsideForward:
    """Return the `OutsideForward` for a mixing module reached without its model's scope."""
    if mark.model is None:
        return OutsideForward(why_severed(module), code="copied-part")
    return OutsideForward(
        f"{type(module).__name__} belongs to a model that autopack enabled, but it was reached "
        "without passing that model's entry, so its documents are unknown. Call the model itself, "
        "not one of its layers or the forward of a class that it is derived from; for gradient "
        "checkpointing use `model.gradient_checkpointing_enable()` or torch's checkpoint "
        "wrappers, since other ways do not carry the layout into backward; or call "
        "`autopack.disable(model)` first.",
        code="past-the-entry",
    )


class ArrivalHook:
    """Forward hook that raises if a module that mixes tokens ran past its site in a packed forward.

    It holds nothing.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raise `UnsupportedModel` if a mixing module has run in a packed forward, past its site.

        Raises `OutsideForward` if it has run in none, as its site would have: a copy has no sites
        until it is called."""
        activation, mark = ambient.activation, module.__dict__.get(MARK)
        if mark is None or torch.compiler.is_compiling():
            return
        if activation is None:
            states = output[0] if isinstance(output, tuple) else output
            if (
                mark.model is None
                or not isinstance(states, torch.Tensor)
                or states.ndim < 3
                or states.shape[-2] != 1
            ):
                raise _outside(module, mark)
            return
        if activation.scope.layout is None:
            return
        if (
            activation.scope.model is mark.link.model
            and mark not in activation.arrived
            and not _is_compiled(module)
        ):
            raise UnsupportedModel(
                f"{type(module).__name__} has run in a packed forward without reaching the place "
                "where autopack keeps documents apart, so it may have mixed them. Its code took a "
                "way that nobody has measured; train it on padded batches, one document per row.",
                code="other-code",
            )


def _is_compiled(module: nn.Module) -> bool:
    """Return True if the module has a compiled forward, in which arrival leaves no trace."""
    method = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    return (
        getattr(method, "__self__", None) is module
        and getattr(method, "__func__", None) is type(module).forward
    )


_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of transformers' modules and of torch's wrappers; both take a function and its
arguments."""


class _Rebound:
    """A checkpointed function that runs, in backward too, in the scope of its first call."""

    def __init__(self, function: Callable[..., Any], scope: Scope):
        self.function = function
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scope.model.active:
            raise OutsideForward(
                "autopack was disabled between a checkpointed forward and its backward, so the "
                "layers cannot be recomputed as they were. Disable after backward.",
                code="disabled-before-backward",
            )
        activation = ambient.activation
        if activation is not None and activation.scope is self.scope:
            # in the forward itself; changing nothing lets Dynamo trace it
            return self.function(*args, **kwargs)
        # A recomputation has its own frame and may have its own thread.
        with in_force(self.scope):
            return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Checkpoint functions of others look at the layer whose method they get (`__self__`,
        # LLaMA-Factory).
        if name == "function":
            raise AttributeError(name)
        return getattr(self.function, name)


class BoundCheckpoint:
    """A checkpoint function that carries the scope in force to the recomputation in backward."""

    def __init__(self, function: Callable[..., Any]):
        self.autopack_original = function

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        activation, bound = ambient.activation, function
        # stays one, for third-party code that opens it
        if activation is not None and isinstance(function, partial):
            bound = partial(
                _Rebound(function.func, activation.scope), *function.args, **function.keywords
            )
        elif activation is not None:
            bound = _Rebound(function, activation.scope)
        return self.autopack_original(bound, *args, **kwargs)


def bind_checkpointing(modules: list[nn.Module], bound: bool = True) -> None:
    """Wrap every checkpoint function of `modules` once; if not `bound`, put them back."""
    for held in map(vars, modules):
        for name in _FUNCTIONS:
            function = held.get(name)
            is_bound = isinstance(function, BoundCheckpoint)
            if function is not None and is_bound is not bound:
                held[name] = BoundCheckpoint(function) if bound else function.autopack_original
