"""What checks of calls cost in a training run: the same steps with them and without, by turns.

    python -m benchmarks.checks --steps 1000
    python -m benchmarks.checks --steps 1000 --own-layers

A Llama is trained on packed rows of random documents; with `--own-layers` its feed-forward layers are of somebody
else's class, so that its calls are checked closely. One copy is enabled as users do it; the other one with
`verify=False`, which checks nothing. Blocks of ten steps alternate, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack.bench.machine import origin
from autopack.bench.race import Entrant, race

BLOCK = 10


class SomebodysMLP(LlamaMLP):
    """A layer that no record covers, and that is exact."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states)


def build(own_layers: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    for layer in model.model.layers if own_layers else ():
        layer.mlp = SomebodysMLP(model.config)
    return model.train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """A packed row of two to eight documents of 16 to 200 tokens."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(16, 201, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator).tolist()
    ids = torch.randint(3, 4096, (1, sum(lengths)), generator=generator)
    where = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": where, "labels": ids}


def entrant(model: LlamaForCausalLM, steps: int) -> Entrant:
    """An arm whose every run is the next block of steps."""
    optimizer, blocks, batches = torch.optim.SGD(model.parameters(), lr=1e-3), iter(range(0, steps, BLOCK)), []

    def ready() -> None:
        first = next(blocks)
        batches[:] = [batch(step) for step in range(first, min(first + BLOCK, steps))]

    def run() -> None:
        for each in batches:
            model(**each).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Entrant(run, ready=ready)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--own-layers", action="store_true", help="with layers that no twin has")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(", ".join(f"{name} {value}" for name, value in origin().items()))
    checked = build(arguments.own_layers)
    plain = copy.deepcopy(checked)
    handle = autopack.enable(checked)
    autopack.enable(plain, verify=False)
    arms = {"checked": entrant(checked, arguments.steps), "not checked": entrant(plain, arguments.steps)}
    laps = race(arms, -(-arguments.steps // BLOCK))
    took = {name: sum(lap["wall"] for lap in of) for name, of in laps.items()}
    print(f"python -m benchmarks.checks --steps {arguments.steps}{' --own-layers' if arguments.own_layers else ''}")
    print(f"{'':12} {'seconds':>8} {'a step':>9}")
    for name, total in took.items():
        print(f"{name:12} {total:8.1f} {1000 * total / arguments.steps:6.1f} ms")
    print(f"ratio        {took['checked'] / took['not checked']:8.4f}")
    print(f"checks       {handle.checked}")


if __name__ == "__main__":
    main()
