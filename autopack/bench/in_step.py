"""The gain of `max_tokens` on a data set, from lengths: ranks that wait for the slowest one in each
optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopack.packing.strategies import CostModel
from autopack.steps.deal import deal

_MOST = 500
"""Number of steps that are counted, the first ones of an epoch."""


@dataclass(frozen=True)
class EstimatedSteps:
    """Optimizer steps of several ranks, whose documents run in one of three ways.

    Attributes:
        name: `"padded"`, `"mini-batch"` or `"max_tokens"`.
        speedup: the cost of the slowest ranks of padded steps, over that of these.
        slowest: the mean over steps of the slowest rank's cost over the mean of all ranks.
        micro_batches: forwards of a rank in a step, on average.
    """

    name: str
    speedup: float
    slowest: float
    micro_batches: float


def in_step(
    lengths: np.ndarray,
    batch_size: int,
    ranks: int,
    accumulation: int,
    max_tokens: int,
    cost: CostModel,
) -> tuple[EstimatedSteps, ...]:
    """Return what padded batches, packed mini-batches and `max_tokens` cost in step; nothing if no
    step is whole.

    `lengths`, (documents,) int, are in the order of the epoch.
    """
    size = ranks * accumulation * batch_size
    steps = lengths[: min(len(lengths) // size, _MOST) * size].reshape(
        -1, ranks, accumulation * batch_size
    )
    if not len(steps):
        return ()
    homes = np.repeat(np.arange(ranks), accumulation * batch_size)
    batches = steps.reshape(len(steps), ranks, accumulation, batch_size)
    costs = {
        "padded": cost(batches.max(-1, keepdims=True) + 0 * batches).sum((2, 3)),
        "mini-batch": cost(steps).sum(2),
    }
    dealt = [deal(step.ravel().tolist(), homes.tolist(), ranks, max_tokens, cost) for step in steps]
    costs["max_tokens"] = np.array(
        [
            [sum(float(cost(step.ravel()[row]).sum()) for row in rows) for rows in of_step]
            for step, of_step in zip(steps, dealt, strict=True)
        ]
    )
    parts = float(np.mean([len(of_step[0]) for of_step in dealt]))
    return tuple(
        EstimatedSteps(
            name,
            float(costs["padded"].max(1).sum() / of_ranks.max(1).sum()),
            float((of_ranks.max(1) / of_ranks.mean(1)).mean()),
            parts if name == "max_tokens" else accumulation,
        )
        for name, of_ranks in costs.items()
    )
