"""Outputs of an unpadded call as parts of the graph of its loss, at no cost where nobody differentiates by them.

A model computes its loss from packed results, and the caller gets padded ones made of those, of which the loss would
know nothing. So a padded result is given a place of its own in the graph, between the packed one and the loss::

    packed ── what the model does ── loss ──> `_Tie` ──> the loss that the caller gets
       └───── `_Place` ──> padded ──────────────┘

Where a gradient of `padded` is asked for, `_Tie` sends to it what the packed result gets, and `_Place` takes the same
out again of what it hands on, so that it does not count twice. Where none is, nothing goes that way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Change = Callable[[torch.Tensor], torch.Tensor]


class Place:
    """The place of one padded result in the graph, and the result: empty until somebody reads it."""

    def __init__(
        self,
        packed: torch.Tensor,
        restore: Change,
        gather: Change,
        shape: tuple[int, ...],
        refuse: Callable[[], None] | None = None,
    ):
        self._way = _Way(packed, restore, gather, refuse)
        self.padded: torch.Tensor = _Place.apply(packed, self._way, shape)
        self._way.padded = weakref.ref(self.padded)

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """The padded result, with its values."""
        self.padded.data = values
        return self.padded


def tied(loss: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """The loss, (), with the padded results in its graph."""
    # Whether a backward pass goes to every leaf is seen by one that nobody can ask for.
    probe = torch.zeros(0, device=loss.device, requires_grad=True).view(0)
    ways = tuple(place._way for place in places)
    return _Tie.apply(loss, ways, probe.grad_fn, probe, *(place.padded for place in places))


class _Way:
    """What the graph knows of a padded result. It does not hold that result, which holds the graph."""

    def __init__(self, packed: torch.Tensor, restore: Change, gather: Change, refuse: Callable[[], None] | None = None):
        self.edge = get_gradient_edge(packed)
        self.restore, self.gather = restore, gather
        self.refuse = refuse
        """Raises, where a gradient comes back to padding."""
        self.padded: weakref.ref[torch.Tensor] | None = None
        self.sent: tuple[int, torch.Tensor] | None = None
        """A backward pass, and the gradient of the packed result that it has sent to the padded one as well."""

    def is_wanted(self, to_every_leaf: bool) -> bool:
        """Whether the backward pass that is under way asks for a gradient of the padded result."""
        padded = None if self.padded is None else self.padded()
        if padded is None or padded.grad_fn is None or not torch._C._will_engine_execute_node(padded.grad_fn):
            return False
        return not to_every_leaf or padded.retains_grad or bool(padded._backward_hooks)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, way: _Way, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return torch.empty_strided(shape, (0,) * len(shape), dtype=packed.dtype, device=packed.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        found, sent = ctx.way.gather(gradient), ctx.way.sent
        ctx.way.sent = None
        if ctx.way.refuse is not None:
            of_tokens = ctx.way.restore(found.detach().nan_to_num())
            if bool((of_tokens != gradient.detach().nan_to_num()).any()):
                ctx.way.refuse()
        if sent is not None and sent[0] == torch._C._current_graph_task_id():
            found = found - sent[1]
        return found, None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, ways: tuple[_Way, ...], probe: Any, _: torch.Tensor, *padded: torch.Tensor
    ) -> torch.Tensor:
        ctx.ways, ctx.probe = ways, probe
        ctx.save_for_backward(loss)
        return loss.clone()  # a view could not be changed in place, as Trainer changes it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_every_leaf = torch._C._will_engine_execute_node(ctx.probe)
        wanted = [way for way in ctx.ways if way.is_wanted(to_every_leaf)]
        gradients: dict[int, torch.Tensor | None] = {}
        if wanted:
            (loss,) = ctx.saved_tensors
            found = torch.autograd.grad(
                loss,
                [way.edge for way in wanted],
                gradient,
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
            for way, part in zip(wanted, found, strict=True):
                if part is not None:
                    way.sent = torch._C._current_graph_task_id(), part
                    gradients[id(way)] = way.restore(part)
        return gradient, None, None, None, *(gradients.get(id(way)) for way in ctx.ways)
