"""The replacement at transformers' loss of language models, for labels that no entry sees.

A forward of transformers gets `labels`, and the entry ignores those at boundaries. A third-party
forward may call them otherwise, make them itself, or declare documents after they came: this site
handles those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.errors import UnsupportedModel
from autopack.inspection import releases
from autopack.inspection.callers import running
from autopack.layout import IGNORED_LABEL
from autopack.layout.packed import PackedLayout, without_boundaries
from autopack.patching import Site
from autopack.runtime import scope as scopes
from autopack.runtime.scope import Activation


def adapt_loss(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a cross entropy without labels at boundaries, for third-party code in packed rows.

    It replaces the function that the loss of language models calls with shifted labels, not that
    loss: trainers compare `model.loss_function` with it to see which labels a loss counts.
    """

    @functools.wraps(original, updated=())
    def autopack_cross_entropy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        activation = scopes.ambient.activation
        if activation is not None and activation.scope.shared is not None:
            meet(target)
        elif activation is not None and activation.foreign:
            target = _masked(target, kwargs.get("ignore_index", IGNORED_LABEL))
        return original(source, target, *args, **kwargs)

    return autopack_cross_entropy


def meet(target: Any) -> None:
    """Note that a loss counts these labels, if ranks share the rows of the current call."""
    activation = scopes.ambient.activation
    if activation is not None and activation.scope.shared is not None and activation.plan is not None:
        activation.met_loss |= activation.plan.counts_labels(target)


@torch._dynamo.disable
def _masked(target: torch.Tensor, ignored: int) -> torch.Tensor:
    activation = scopes.current()
    layouts = [] if activation is None or not _is_shifted() else documents_of(activation)
    if activation is None or not layouts:
        return target
    if any(not np.array_equal(layout.bounds, layouts[0].bounds) for layout in layouts):
        raise UnsupportedModel(
            "a loss was computed in a forward that has run packed rows of different documents, so autopack cannot tell "
            "whose labels it was given. Compute the loss from the logits.",
            code="loss-not-of-documents",
        )
    activation.met_loss = True
    return without_boundaries(target, layouts[0], shifted=True, ignored=ignored)


def _is_shifted() -> bool:
    """Return True if the labels come from the loss of language models; others do not shift."""
    loss: Any = releases.shifting_loss()
    return any(frame.f_code is loss.__code__ for frame in running(function=loss.__code__.co_name))


def documents_of(activation: Activation) -> list[PackedLayout]:
    """Return the layouts of the packed rows that have run in a forward."""
    layout = activation.scope.layout
    return activation.inside if layout is None else [layout]
