"""Arms of an estimate, which are ways of making batches; optimizer steps of ranks that wait for the
slowest one; and the time on a GPU, predicted by roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from autopack.packing.strategies import CostModel
from autopack.steps.deal import deal

Order = Literal["random", "grouped"]
_MOST = 500
"""Number of steps that are counted, the first ones of an epoch."""


@dataclass(frozen=True)
class EstimatedArm:
    """Costs of one epoch of the documents in one kind of batches.

    Attributes:
        name: `"padded"`, `"mini-batch"` or a strategy of `autopack.packing.plan`, followed by `",
            groups"` where documents that begin alike share rows.
        batch_size: documents of a padded batch, or of a mini-batch that becomes one packed row;
            None for plans.
        order: of the documents of padded batches: `"random"`, or `"grouped"` by length as
            transformers' `group_by_length` does; None for others.
        rows: padded rows, or packed rows.
        tokens: columns that are computed, padding among them; rows of a plan are padded to the
            longest of them.
        padding: the share of those that is padding.
        pairs: pairs of columns that attention computes, the sum of squared lengths; causal
            attention needs half.
        cost: by the cost model, in tokens.
        speedup: the cost of the baseline over this one.
        tokens_saved, attention_saved: the share of the baseline's tokens, and of its pairs, that it
            does not compute.
    """

    name: str
    batch_size: int | None
    order: Order | None
    rows: int
    tokens: int
    padding: float
    pairs: int
    cost: float
    speedup: float
    tokens_saved: float
    attention_saved: float

    @property
    def label(self) -> str:
        """Name of the arm, with the order of its documents, or their number in a packed row."""
        size = f" of {self.batch_size}" if self.batch_size else ""
        return self.name + (f", {self.order}" if self.order else size)


@dataclass(frozen=True)
class EstimatedSteps:
    """Costs of optimizer steps, in which ranks wait for the slowest, with one kind of batches.

    Attributes:
        name: `"padded"`, `"mini-batch"` or `"max_tokens"`.
        speedup: the cost of the slowest ranks of padded steps, over these steps' cost.
        slowest: the mean over steps of the slowest rank's cost over the mean of all ranks.
        micro_batches: forwards of a rank in a step, on average.
    """

    name: str
    speedup: float
    slowest: float
    micro_batches: float


def cost_of_steps(
    lengths: np.ndarray,
    batch_size: int,
    ranks: int,
    accumulation: int,
    max_tokens: int,
    cost: CostModel,
) -> tuple[EstimatedSteps, ...]:
    """Return the costs of steps of padded, mini- and `max_tokens` batches; () if none is whole.

    `lengths`, (documents,) int, are in the order of the epoch.
    """
    size = ranks * accumulation * batch_size
    whole = lengths[: min(len(lengths) // size, _MOST) * size]
    steps, batches = whole.reshape(-1, size), whole.reshape(-1, ranks, accumulation, batch_size)
    if not len(steps):
        return ()
    homes = np.repeat(np.arange(ranks), accumulation * batch_size).tolist()
    dealt = [deal(step.tolist(), homes, ranks, max_tokens, cost) for step in steps]
    of_dealt = [
        [cost(step[[*chain(*rows)]]).sum() for rows in of_step]
        for step, of_step in zip(steps, dealt, strict=True)
    ]
    costs = {
        "padded": batch_size * cost(batches.max(-1)).sum(2),
        "mini-batch": cost(batches).sum((2, 3)),
        "max_tokens": np.array(of_dealt),
    }
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


# By NVIDIA's data sheets of H100 and A100 (SXM, 80 GB) and its Ada white paper, and AMD's of
# MI300X.
DEVICES = {
    "h100": (989.4e12, 3.35e12),
    "a100": (312e12, 2.039e12),
    "rtx4090": (165.2e12, 1.008e12),
    "mi300x": (1307.4e12, 5.3e12),
}
"""Speed of GPUs by their data sheets: bfloat16 operations and bytes of memory per second."""
LAUNCH = 4e-6
"""Seconds in which the host starts an operation, assumed."""
LAYER_OPERATIONS, LAYER_VALUES = 111, 240
"""Operations that a layer of a Llama starts in a training step, without torch.compile; and values
in bfloat16, per token and unit of the hidden size, that those move that are no matrix products
(benchmarks/results/counted.txt)."""


@dataclass(frozen=True)
class PredictedArm:
    """Time of an arm on a GPU by roofline: predicted, not measured.

    Attributes:
        name: of the arm.
        bound_by: `"arithmetic"`, `"memory"` or `"launches"`, whichever takes longest.
        seconds: of forward and backward of all documents, without an optimizer or other GPUs.
        tokens_per_second: real tokens.
        speedup: the seconds of the baseline over these.
    """

    name: str
    bound_by: str
    seconds: float
    tokens_per_second: float
    speedup: float


def hidden_size(cost: CostModel) -> int:
    """Return the hidden size behind a cost model. Raises `ValueError` if one of its costs is 0."""
    if not cost.linear or not cost.quadratic:
        raise ValueError(
            f"on= wanted a cost model of a hidden size (CostModel.for_model), found {cost}"
        )
    return round(cost.linear / (12 * cost.quadratic))


def layers_of(hidden: int) -> int:
    """Return a usual number of layers of a Llama of this hidden size."""
    return max(1, hidden // 128)


def predict(
    arms: Sequence[EstimatedArm], on: str, cost: CostModel, real: int
) -> tuple[PredictedArm, ...]:
    """Return each arm's time on the GPU named `on`, by roofline; the first arm is the baseline.

    `real` is the number of real tokens. A layer has 12 h² parameters, at hidden size h, so a token
    costs 72 h² operations in it, forward and backward. Every call reads the weights twice and
    writes their gradients once. Matrix products take as long as their operations or these bytes,
    whichever is longer, and the rest as long as the bytes that it moves. Nothing is faster than the
    host starts it.
    """
    (operations, bandwidth), hidden = DEVICES[on], hidden_size(cost)
    layers = layers_of(hidden)
    step = 72 * hidden**2 * layers
    found = []
    for arm in arms:
        calls = -(-arm.rows // arm.batch_size) if arm.order and arm.batch_size else arm.rows
        moved = 2 * LAYER_VALUES * hidden * layers * arm.tokens / bandwidth
        limits = {
            "arithmetic": step * arm.cost / cost.linear / operations + moved,
            "memory": step * calls / bandwidth + moved,
            "launches": LAYER_OPERATIONS * layers * calls * LAUNCH,
        }
        found.append(max((took, bound) for bound, took in limits.items()))
    return tuple(
        PredictedArm(arm.label, bound, took, real / took, found[0][0] / took)
        for arm, (took, bound) in zip(arms, found, strict=True)
    )
