"""What checks of calls cost in a training run: the same steps with them and without, by turns.

    python -m benchmarks.checks --steps 1000

A Llama is trained on packed rows of random documents; in the race `own layers` its feed-forward
layers are of somebody else's class, so that its calls are checked closely. One copy is enabled as
users do it; the other one with `verify=False`, which checks nothing. Rounds are blocks of steps, so
that a machine that slows down slows both; what counts are the sums of all rounds, for checks grow
rarer."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from itertools import count
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack.bench.race import Batch, Entrant, wait_for
from benchmarks import interleave, workload

VOCABULARY = 4096


class SomebodysMLP(LlamaMLP):
    """A layer that no record covers, and that is exact."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states)


def batch(step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a packed row of two to eight documents of 16 to 200 tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(
        16, 201, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator
    ).tolist()
    return Batch.of(lengths, torch.arange(3, VOCABULARY), step, device).row(
        autopack.PackingCollator()
    )


def entrant(model: Any, block: int) -> Entrant:
    """Return an arm whose every run is the next block of steps."""
    optimizer, numbers, batches = torch.optim.SGD(model.parameters(), lr=1e-3), count(), []

    def ready() -> None:
        batches[:] = [batch(next(numbers), model.device) for _ in range(block)]

    def run() -> None:
        for each in batches:
            workload.step(model, each, optimizer)()

    return Entrant(run, ready=ready, wait=partial(wait_for, model.device))


def race_of(options: argparse.Namespace, *, own_layers: bool) -> interleave.Race:
    """Return the race of a model with layers of one's own, or without."""
    plain = workload.llama(4, 256, 4, VOCABULARY)
    for layer in plain.model.layers if own_layers else ():
        layer.mlp = SomebodysMLP(plain.config)
    plain.train().to(options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    checked = copy.deepcopy(plain)
    autopack.enable(checked)
    autopack.enable(plain, verify=False)
    block = options.steps // options.rounds
    arms = {"not checked": entrant(plain, block), "checked": entrant(checked, block)}
    return interleave.Race(arms, "checked", warm=0, facts={"steps": block * options.rounds})


if __name__ == "__main__":
    races = {
        name: partial(race_of, own_layers=name == "own layers") for name in ("Llama", "own layers")
    }
    interleave.main("checks", __doc__, races, 100, steps=1000, device="cpu")
