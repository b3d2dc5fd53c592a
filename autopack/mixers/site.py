"""The replacement that stands at the forward of a module that a family keeps within documents in a way of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopack.delivery import ACROSS, Scope, site_scope
from autopack.errors import UnsupportedModel
from autopack.layout import PackedLayout
from autopack.mixers.rows import Spread
from autopack.patching import Site

__all__ = ["MixerCall", "adapt_mixer", "spread_tokens"]

_PER_CALL = ("cache_params", "past_key_values", "layer_past", "cache", "attention_mask", "conv_mask", "state")
"""Arguments that a document alone does not have: caches, states and padding masks."""


def adapt_mixer(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A module's forward that gives every document of a packed row what it gets alone."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original, updated=())
    def autopack_mixer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        scope = site_scope(self)
        if scope is None or scope.layout is None:
            return original(self, *args, **kwargs)
        return _mix(original, names, scope, self, args, kwargs)

    autopack_mixer.autopack_original = original  # type: ignore[attr-defined]
    return autopack_mixer


@torch._dynamo.disable
def _mix(
    original: Callable[..., Any],
    names: list[str],
    scope: Scope,
    mixer: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if "use_cache" in names:
        arguments["use_cache"] = False
    assert scope.layout is not None
    first = arguments.get(names[0])
    layout = scope.layout.to(first.device) if isinstance(first, torch.Tensor) else scope.layout
    memory = scope.memory.to(layout.device) if scope.memory is not None and ACROSS in mixer.__dict__ else None
    call = MixerCall(original, mixer, names[0], arguments, layout, scope.want_weights, memory)
    return scope.owner.way_of(mixer).run(call)


@dataclass(frozen=True)
class MixerCall:
    """One call of a module inside a packed forward."""

    original: Callable[..., Any]
    mixer: torch.nn.Module
    first: str
    """Name of the first parameter, which holds the tokens."""
    arguments: dict[str, Any]
    layout: PackedLayout
    want_weights: bool
    """Whether the caller asked for attention weights."""
    memory: PackedLayout | None = None
    """The layout of the encoder's states, where this is cross-attention."""

    def by_documents(self, spread: Spread) -> Any:
        """Run the module's own forward on tokens in another form, without caches and masks."""
        return self.changed(
            lambda name, value: None if name in _PER_CALL else spread_tokens(value, self.layout, spread),
        )

    def changed(self, change: Callable[[str, Any], Any]) -> Any:
        """Run the module's own forward with other arguments."""
        given = {name: change(name, value) for name, value in self.arguments.items()}
        return self.original(self.mixer, given.pop(self.first), **given)

    def check(self) -> None:
        """Raise `UnsupportedModel` where the first tensor does not hold the tokens of the layout."""
        tokens = next((value for value in self.arguments.values() if isinstance(value, torch.Tensor)), None)
        shape = () if tokens is None else tuple(tokens.shape)
        if shape[:2] != (self.layout.rows, self.layout.columns):
            raise UnsupportedModel(
                f"{type(self.mixer).__name__} got tokens of shape {shape} inside a packed forward of "
                f"{self.layout.rows} rows of {self.layout.columns} tokens"
            )


def spread_tokens(value: Any, layout: PackedLayout, spread: Spread) -> Any:
    """An argument in another form, where it has something for every token: a tensor (rows or 1, columns, ...)."""
    if isinstance(value, tuple):
        return tuple(spread_tokens(part, layout, spread) for part in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.columns:
        return value
    return spread(value.expand(layout.rows, *value.shape[1:]))
