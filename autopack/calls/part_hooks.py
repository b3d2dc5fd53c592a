"""Hooks on parts of an enabled model: what they get or give in a call depends on its plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopack.runtime import scope as scopes
from autopack.runtime.model import Link


class PoolerHook:
    """Forward pre-hook of a backbone's pooler, which reads the first token of every row.

    It gets the rows of a padded batch back, and one row for each document of packed rows.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.plan is None or not args:
            return None
        rows = running.plan.rows_for_pooler(args[0])
        if rows is None:
            return None
        running.pooled = True
        return (rows, *args[1:])


class OwnPositionsHook:
    """Forward pre-hook of models of media that may be handed the positions of packed rows, which number other tokens.

    Models of BLIP hand all that they do not name on to their tower and Q-Former (InstructBLIP Video). That one would
    number its own tokens by them, and flash attention take a tower's row for documents.
    """

    def __init__(self, link: Link):
        self.link = link

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running = scopes.of_model(self.link.follow(module))
        if running is None or running.scope.layout is None or "position_ids" not in kwargs:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "position_ids"}


class SpanLogitsHook:
    """Forward hook of the parts of a question answering head: logits at padding become the least of their dtype.

    It holds nothing, since PEFT copies the heads that it trains.
    """

    # Traced, it is left out of a graph for other lengths (torch 2.13), and padding would count.
    @torch._dynamo.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        running = scopes.current()
        found = None if running is None or running.plan is None else running.plan.span_logits(output)
        if running is not None and found is not None:
            running.masked = True
        return found
