"""Parts that a call meets inside an enabled model, by its plan: poolers, models of media, heads,
the loss.

A forward of transformers gets `labels`, and the entry ignores those at boundaries. A third-party
forward may call them otherwise, make them itself, or declare documents after they came: the
replacement at transformers' loss of language models handles those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from autopack.errors import UnsupportedModel
from autopack.inspection import releases
from autopack.inspection.callers import running
from autopack.layout import IGNORED_LABEL
from autopack.layout.packed import without_boundaries
from autopack.patching import Site
from autopack.runtime import scope as scopes
from autopack.runtime.model import Link


class PoolerHook:
    """Forward pre-hook of a backbone's pooler that hands it one row per document.

    A pooler reads the first token of every row. Of a padded batch it gets the rows back.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return args with one document per row of states, set `pooled`; None if they stay."""
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.plan is None or not args:
            return None
        rows = running.plan.rows_for_pooler(args[0])
        if rows is None:
            return None
        running.pooled = True
        return (rows, *args[1:])


class OwnPositionsHook:
    """Forward pre-hook of image and audio models that removes the text's `position_ids`.

    Models of BLIP hand all that they do not name on to their tower and Q-Former (InstructBLIP
    Video). That one would number its own tokens by them, and flash attention take a tower's row for
    documents.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return (args, kwargs) without `position_ids` in a packed call; None if they stay."""
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.scope.layout is None or "position_ids" not in kwargs:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "position_ids"}


class SpanLogitsHook:
    """Forward hook of a question answering head that sets logits at padding to the least number.

    It holds nothing, since PEFT copies the heads that it trains.
    """

    # Traced, it is left out of a graph for other lengths (torch 2.13), and padding would count.
    @torch._dynamo.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """Return the logits with padding hidden, and set `masked`; None if they stay."""
        running = scopes.current()
        if running is None or running.plan is None:
            return None
        found = running.plan.span_logits(output)
        running.masked |= found is not None
        return found


def adapt_loss(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a cross entropy that, in third-party code, ignores labels at boundaries of documents.

    It replaces the function that the loss of language models calls with shifted labels, not that
    loss: trainers compare `model.loss_function` with it to see which labels a loss counts.
    """

    @functools.wraps(original, updated=())
    def autopack_cross_entropy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        activation = scopes.ambient.activation
        if activation is not None and activation.scope.shared is not None:
            mine = getattr(activation.plan, "targets", None)
            activation.met_loss |= (
                isinstance(target, Tensor)
                and mine is not None
                and (target.numel(), target.data_ptr()) == (mine.numel(), mine.data_ptr())
            )
        elif activation is not None and activation.foreign:
            target = _without_labels_at_boundaries(
                target, kwargs.get("ignore_index", IGNORED_LABEL)
            )
        return original(source, target, *args, **kwargs)

    return autopack_cross_entropy


@torch._dynamo.disable
def _without_labels_at_boundaries(target: Tensor, ignored: int) -> Tensor:
    """Return shifted labels, `ignored` at boundaries; note the loss. Others pass unchanged.

    Labels pass unchanged outside of packed rows and of transformers' own loss of language models,
    which shifts. Raises `UnsupportedModel` if packed rows of different documents have run in the
    forward.
    """
    activation, loss = scopes.current(), cast(Any, releases.shifting_loss())
    # Labels of other losses are not shifted.
    shifts = any(frame.f_code is loss.__code__ for frame in running(function=loss.__code__.co_name))
    if activation is None or not shifts or not activation.layouts:
        return target
    layout, *others = activation.layouts
    if any(not np.array_equal(layout.bounds, other.bounds) for other in others):
        raise UnsupportedModel(
            "a loss was computed in a forward that has run packed rows of different documents, so "
            "autopack cannot tell whose labels it was given. Compute the loss from the logits.",
            code="loss-not-of-documents",
        )
    activation.met_loss = True
    return without_boundaries(target, layout, shifted=True, ignored=ignored)
