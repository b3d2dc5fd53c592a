"""The replacement that stands at the forward of a module that a family keeps within documents in a way of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import wrapt

from autopack.errors import UnsupportedModel
from autopack.family import MixerCall
from autopack.inspection import torches
from autopack.inspection.parameters import parameters_of
from autopack.patching import Site
from autopack.runtime.marks import mark_of
from autopack.runtime.scope import Scope, site_scope


def adapt_mixer(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A module's forward that gives every document of a packed row what it gets alone."""
    owner = wrapt.resolve_path(import_module(site.module), site.path)[0]
    names = parameters_of(owner).names
    if not names:
        raise UnsupportedModel(
            f"{site} does not name its arguments, so autopack cannot tell which of them holds the tokens. Take away "
            f"what is wrapped around it, or train the model on padded batches, one document per row."
        )

    @functools.wraps(original, updated=())
    def autopack_mixer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get(names[0])
        one_token = isinstance(first, torch.Tensor) and first.ndim > 1 and first.shape[1] == 1
        scope = site_scope(self, one_token)
        if scope is None or scope.layout is None:
            return original(self, *args, **kwargs)
        return mix(self, scope, {**torches.by_name(names, args), **kwargs})

    @torch._dynamo.disable
    def mix(mixer: torch.nn.Module, scope: Scope, arguments: dict[str, Any]) -> Any:
        mark = mark_of(mixer)
        assert scope.layout is not None
        assert mark is not None
        assert mark.way is not None
        if "use_cache" in names:
            arguments["use_cache"] = False
        first = arguments.get(names[0])
        layout = scope.layout.to(first.device) if isinstance(first, torch.Tensor) else scope.layout
        memory = scope.memory.to(layout.device) if scope.memory is not None and mark.reads_encoder else None
        return mark.way.run(MixerCall(original, mixer, names[0], arguments, layout, scope.want_weights, memory))

    return autopack_mixer
