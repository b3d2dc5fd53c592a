"""Further forwards of a whole model within one call: documents that run alone, and forwards that only keep ranks
aligned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopack.calls.call import Call
from autopack.layout.ways import CACHES
from autopack.runtime import scope as scopes
from autopack.runtime.runs import Steps, leaving_nothing, with_idle
from autopack.runtime.scope import Scope, in_force


@contextmanager
def running_again(call: Call) -> Iterator[None]:
    """Call the model of a call, which is about to end, again: no call of its own for those who count calls."""
    with in_force(Scope(call.model), call.entry.level):
        yield


def steps_of(call: Call) -> Steps | None:
    """The runs of a call that has run once, where some rank may run documents alone in it; else None.

    Whether it is None is the same on all ranks: any call of such a head may be one of packed rows.
    """
    head = call.entry.head
    if head is None or head.of_choices or not call.model.groups or scopes.of_model(call.model) is not None:
        return None
    steps = Steps(call.model.groups)
    steps.begin()
    return steps


def idle_outputs(
    call: Call, module: nn.Module, steps: Steps, arguments: dict[str, Any], obstacle: str | None = None
) -> list[Any]:
    """The outputs of the runs with these arguments that other ranks need. Raises `UnsupportedModel` for an obstacle."""
    outputs = []
    for _ in steps.idle(obstacle):
        with leaving_nothing(module), call.model.tally.unchanged():
            outputs.append(module(**arguments))
    return outputs


@torch._dynamo.disable
def run_in_step(call: Call | None, module: nn.Module, output: Any) -> Any:
    """The output of a call that has run once, after idle runs for ranks that run documents alone in it."""
    steps = None if call is None else steps_of(call)
    if call is None or steps is None:
        return output
    held = next((name for name in CACHES if call.arguments.get(name) is not None), None)
    obstacle = None if held is None else f"{call.name} was called with a cache ({held}) on this one."
    with running_again(call):
        return with_idle(output, idle_outputs(call, module, steps, call.arguments, obstacle))
