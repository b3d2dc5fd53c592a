"""One recurrent or convolutional mixer on a packed row: stock (which leaks), one document at a
time, autopack.

    python -m benchmarks.mixers                                         T = 2048, about ten minutes on two cores
    python -m benchmarks.mixers --tokens 512 --rounds 1                 a first look
    python -m benchmarks.mixers --only Mamba mLSTM                      some of them
    python -m benchmarks.mixers --json benchmarks/results/mixers.json

The arms are forward and backward of the same module, in float32, in transformers' own code for this
machine:

* `stock`: the whole row, as if it were one document. This is wrong; it is what packing costs if
  nobody cares.
* `one by one`: a Python loop over the documents. What autopack is held against.
* `autopack`: the module inside an enabled model.

Before anything is timed, the last two must give the same output and gradients; `apart` of stock is
its leak."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from autopack.bench.subjects import Lengths
from benchmarks import interleave, workload

LENGTHS = Lengths(128, 0.7)

MIXERS: dict[str, tuple[str, str, float | None, dict[str, Any]]] = {
    "Mamba": ("mamba", "MambaMixer", 2.0, {"state_size": 16, "expand": 2}),
    "Mamba-2 (SSD)": (
        "mamba2",
        "Mamba2Mixer",
        0.65,
        {
            "state_size": 128,
            "num_heads": 4,
            "head_dim": 64,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": 256,
        },
    ),
    "gated delta net": (
        "qwen3_next",
        "Qwen3NextGatedDeltaNet",
        0.65,
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention"],
        },
    ),
    "Kimi delta attention": (
        "kimi_linear",
        "KimiLinearDeltaAttention",
        None,
        {
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "num_attention_heads": 4,
            "layer_types": ["linear_attention"],
        },
    ),
    "short convolution": (
        "lfm2",
        "Lfm2ShortConv",
        0.9,
        {"layer_types": ["conv"], "block_dim": 128},
    ),
    "RG-LRU block": (
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        2.0,
        {"lru_width": 128, "num_attention_heads": 4, "block_types": ["recurrent"]},
    ),
    "RWKV time mixing": (
        "rwkv",
        "RwkvSelfAttention",
        2.0,
        {"attention_hidden_size": 128, "num_hidden_layers": 2},
    ),
    "RWKV channel mixing": (
        "rwkv",
        "RwkvFeedForward",
        None,
        {"attention_hidden_size": 128, "num_hidden_layers": 2},
    ),
    "mLSTM": ("xlstm", "xLSTMLayer", None, {"num_heads": 4}),
}
"""Model type, class, goal for stock / autopack, and its dimensions beside hidden_size."""


def build(name: str, hidden: int) -> tuple[Any, Any]:
    """A model of one layer (RWKV cannot be built with fewer than two) and its first mixer."""
    from autopack import tiny

    model_type, cls, _, dimensions = MIXERS[name]
    model = tiny.build(
        model_type, **{"hidden_size": hidden, "num_hidden_layers": 1, **dimensions}
    ).train()
    return model, next(module for module in model.modules() if type(module).__name__ == cls)


def race_of(options: argparse.Namespace, *, name: str) -> interleave.Race:
    """Return the race of a mixer: forward and backward on one row of documents."""
    import torch

    import autopack
    from autopack.layout.packed import PackedLayout
    from autopack.runtime.scope import Scope, in_force

    _, cls, goal, _ = MIXERS[name]
    documents = workload.filling(options.tokens, LENGTHS, options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    inputs = torch.randn(1, sum(documents), options.hidden, generator=generator)
    _, stock = build(name, options.hidden)
    model, enabled = build(name, options.hidden)
    handle = autopack.enable(model)
    layout = PackedLayout.from_lengths([documents])

    def tensor(output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output

    def call(mixer: Any, hidden: Any, positions: Any = None) -> Any:
        if cls == "RecurrentGemmaRecurrentBlock":
            positions = torch.arange(hidden.shape[1])[None] if positions is None else positions
            return tensor(mixer(hidden, positions, torch.ones_like(positions), use_cache=False))
        return tensor(mixer(hidden))

    def packed(hidden: Any) -> Any:
        with in_force(Scope(handle.enabled, layout)):
            return call(enabled, hidden, layout.position_ids())

    def by_document(hidden: Any) -> Any:
        return torch.cat([call(stock, part) for part in hidden.split(documents, dim=1)], dim=1)

    def run(mixer: Any, forward: Callable[[Any], Any]) -> Callable[[], Any]:
        def arm() -> Any:
            hidden = inputs.clone().requires_grad_()
            mixer.zero_grad()
            output = forward(hidden)
            output.square().sum().backward()
            return output.detach(), [hidden.grad, *(p.grad for p in mixer.parameters())]

        return arm

    arms = {
        "one by one": run(stock, by_document),
        "stock": run(stock, lambda hidden: call(stock, hidden)),
        "autopack": run(enabled, packed),
    }
    goals = {"one by one": 1.0, **({"stock": goal} if goal else {})}
    facts = {"tokens": sum(documents), "documents": len(documents)}
    return interleave.Race(arms, "autopack", goals, wrong=("stock",), facts=facts)


if __name__ == "__main__":
    races = {name: partial(race_of, name=name) for name in MIXERS}
    interleave.main("mixers", __doc__, races, tokens=2048, hidden=128)
