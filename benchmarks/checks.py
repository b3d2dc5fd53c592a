"""What checks of calls cost in a training run: the same steps with them and without, by turns.

    python -m benchmarks.checks --steps 1000
    python -m benchmarks.checks --steps 1000 --own-layers

A Llama is trained on packed rows of random documents; with `--own-layers` its feed-forward layers are of somebody
else's class, so that its calls are checked closely. One copy is enabled as users do it; the other one with
`verify=False`, which checks nothing. Blocks of ten steps alternate, so that a machine that slows down slows both.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack.bench.contest import Batch
from autopack.bench.race import Entrant, wait_for
from benchmarks import interleave, workload

BLOCK, VOCABULARY = 10, 4096


class SomebodysMLP(LlamaMLP):
    """A layer that no record covers, and that is exact."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states)


def build(own_layers: bool) -> Any:
    """Return the model that is trained."""
    model = workload.llama(4, 256, 4, VOCABULARY)
    for layer in model.model.layers if own_layers else ():
        layer.mlp = SomebodysMLP(model.config)
    return model.train()


def batch(step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a packed row of two to eight documents of 16 to 200 tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(16, 201, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator).tolist()
    return Batch.of(lengths, torch.arange(3, VOCABULARY), step, device).row(autopack.PackingCollator())


def entrant(model: Any, steps: int) -> Entrant:
    """An arm whose every run is the next block of steps."""
    optimizer, blocks, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(range(0, steps, BLOCK)), []

    def ready() -> None:
        first = next(blocks)
        batches[:] = [batch(step, model.device) for step in range(first, min(first + BLOCK, steps))]

    def run() -> None:
        for each in batches:
            model(**each).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Entrant(run, ready=ready, wait=partial(wait_for, model.device))


def main() -> None:
    parser = interleave.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--own-layers", action="store_true", help="with layers that no twin has")
    parser.add_argument("--device", default="cpu", help="on CUDA in bfloat16 (cpu)")
    options = parser.parse_args()
    where = interleave.begin(options)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    checked = build(options.own_layers).to(options.device, dtype)
    plain = copy.deepcopy(checked)
    handle = autopack.enable(checked)
    autopack.enable(plain, verify=False)
    arms = {"checked": entrant(checked, options.steps), "not checked": entrant(plain, options.steps)}
    times = interleave.interleave(arms, -(-options.steps // BLOCK), None)
    took = {name: sum(of["wall"]) for name, of in times.items()}
    lines = [f"{'':12} {'seconds':>8} {'a step':>9}"]
    lines += [f"{name:12} {total:8.1f} {1000 * total / options.steps:6.1f} ms" for name, total in took.items()]
    lines += [f"ratio        {took['checked'] / took['not checked']:8.4f}", f"checks       {handle.checked}"]
    interleave.write(options.json, interleave.result_of("checks", options, where, seconds=times), lines)


if __name__ == "__main__":
    main()
