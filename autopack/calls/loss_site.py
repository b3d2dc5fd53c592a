"""The replacement at transformers' loss of language models, for labels that come to it by ways that no entry sees.

A forward of transformers gets `labels`, and the entry ignores those at boundaries. Somebody else's forward may call
them otherwise, make them itself, or declare documents after they came: then this is where they are met.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.errors import UnsupportedModel
from autopack.layout.labels import without_boundaries
from autopack.layout.packed import PackedLayout
from autopack.patching import Site
from autopack.runtime import scope as scopes
from autopack.runtime.scope import Activation


def adapt_loss(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A loss that shifts labels and ignores those at the boundaries of documents, for foreign code in a packed call."""
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original, updated=())
    def autopack_loss(*args: Any, **kwargs: Any) -> Any:
        activation = scopes.ambient.activation
        if activation is None or not activation.foreign:
            return original(*args, **kwargs)
        return original(**_masked({**dict(zip(names, args, strict=False)), **kwargs}))

    return autopack_loss


@torch._dynamo.disable
def _masked(given: dict[str, Any]) -> dict[str, Any]:
    activation = scopes.current()
    layouts = [] if activation is None else documents_of(activation)
    if activation is None or not layouts:
        return given
    if any(not np.array_equal(layout.bounds, layouts[0].bounds) for layout in layouts):
        raise UnsupportedModel(
            "a loss was computed in a forward that has run packed rows of different documents, so autopack cannot tell "
            "whose labels it was given. Compute the loss from the logits."
        )
    activation.met_loss = True
    # Where the shifted ones are given, the others are not read.
    name = "labels" if given.get("shift_labels") is None else "shift_labels"
    if isinstance(given.get(name), torch.Tensor):
        given[name] = without_boundaries(given[name], layouts[0], shifted=name == "shift_labels")
    return given


def documents_of(activation: Activation) -> list[PackedLayout]:
    """The layouts of the packed rows that have run in a forward."""
    layout = activation.scope.layout
    return activation.inside if layout is None else [layout]
