"""The replacement that stands at the forward of a recurrent or convolutional mixer while a model is enabled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from autopack.delivery import Scope, site_scope
from autopack.errors import UnsupportedModel
from autopack.layout import PackedLayout
from autopack.mixers.rows import Spread
from autopack.patching import Site

__all__ = ["adapt_mixer"]

_PER_CALL = ("cache_params", "past_key_values", "attention_mask", "conv_mask", "state")
"""Arguments that a document alone does not have: caches, states and padding masks."""


def adapt_mixer(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mixer's forward that lets every document of a packed row start from an empty state."""
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
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
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    layout, hidden = scope.layout, call[names[0]]
    assert layout is not None
    if tuple(hidden.shape[:2]) != (layout.rows, layout.columns):
        raise UnsupportedModel(
            f"{type(mixer).__name__} got hidden states of shape {tuple(hidden.shape)} inside a packed forward of "
            f"{layout.rows} rows of {layout.columns} tokens"
        )
    layout = layout.to(hidden.device)
    alone = {name: None if name in _PER_CALL else value for name, value in call.items()}
    if "use_cache" in names:
        alone["use_cache"] = False

    def run(spread: Spread) -> Any:
        own = {name: _spread(value, layout, spread) for name, value in alone.items()}
        return original(mixer, own.pop(names[0]), **own)

    return scope.owner.way_of(mixer).run(run, layout, mixer)


def _spread(value: Any, layout: PackedLayout, spread: Spread) -> Any:
    if isinstance(value, tuple):
        return tuple(_spread(part, layout, spread) for part in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.columns:
        return value
    return spread(value.expand(layout.rows, *value.shape[1:]))
