"""One recurrent or convolutional mixer on a packed row: stock (which leaks), one document at a time, autopack.

    python -m benchmarks.mixers                                         T = 2048, about ten minutes on two cores
    python -m benchmarks.mixers --tokens 512 --rounds 1                 a first look
    python -m benchmarks.mixers --only mamba2 lfm2                      some of them
    python -m benchmarks.mixers --json benchmarks/results/mixers.json

The arms are forward and backward of the same module, in float32, in transformers' own code for this machine:

* `stock`: the whole row, as if it were one document. This is wrong; it is what packing costs if nobody cares.
* `one by one`: a Python loop over the documents. What autopack is held against.
* `autopack`: the module inside an enabled model.

Before anything is timed, the last two must give the same output and gradients, and stock another output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from autopack.bench.subjects import Lengths
from benchmarks import interleave, workload

TOLERANCE = 1e-4
"""Relative, for outputs and gradients: float32 sums over thousands of tokens in another order."""
LEAK = 1e-2
LENGTHS = Lengths(128, 0.7)

MIXERS: dict[str, tuple[str, str, float | None, dict[str, Any]]] = {
    "Mamba": ("mamba", "MambaMixer", 2.0, {"state_size": 16, "expand": 2}),
    "Mamba-2 (SSD)": (
        "mamba2",
        "Mamba2Mixer",
        0.65,
        {"state_size": 128, "num_heads": 4, "head_dim": 64, "expand": 2, "n_groups": 1, "chunk_size": 256},
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
        {"linear_head_dim": 32, "linear_num_heads": 4, "num_attention_heads": 4, "layer_types": ["linear_attention"]},
    ),
    "short convolution": ("lfm2", "Lfm2ShortConv", 0.9, {"layer_types": ["conv"], "block_dim": 128}),
    "RG-LRU block": (
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        2.0,
        {"lru_width": 128, "num_attention_heads": 4, "block_types": ["recurrent"]},
    ),
    "RWKV time mixing": ("rwkv", "RwkvSelfAttention", 2.0, {"attention_hidden_size": 128, "num_hidden_layers": 2}),
    "RWKV channel mixing": ("rwkv", "RwkvFeedForward", None, {"attention_hidden_size": 128, "num_hidden_layers": 2}),
    "mLSTM": ("xlstm", "xLSTMLayer", None, {"num_heads": 4}),
}
"""Model type, class, goal for stock / autopack, and its dimensions beside hidden_size."""


def build(name: str, hidden: int) -> tuple[Any, Any]:
    """A model of one layer (RWKV cannot be built with fewer than two) and its first mixer."""
    from autopack import tiny

    model_type, cls, _, dimensions = MIXERS[name]
    model = tiny.build(model_type, **{"hidden_size": hidden, "num_hidden_layers": 1, **dimensions}).train()
    return model, next(module for module in model.modules() if type(module).__name__ == cls)


def arms(name: str, documents: list[int], options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """For each arm, a forward that returns the output and the input that it was made from."""
    import torch

    import autopack
    from autopack.layout.packed import PackedLayout
    from autopack.runtime.scope import Scope, in_force

    cls = MIXERS[name][1]
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

    return {
        "stock": run(stock, lambda hidden: call(stock, hidden)),
        "one by one": run(stock, by_document),
        "autopack": run(enabled, packed),
    }


def check(found: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Relative errors against one document at a time; raises where autopack differs, or stock does not."""
    expected, gradients = found["one by one"]()

    def error(a: Any, b: Any) -> float:
        return 0.0 if a is b else ((a - b).norm() / b.norm()).item()

    gradients = [g.clone() for g in gradients if g is not None]
    output, others = found["autopack"]()
    worst = max(error(a, b) for a, b in zip((g for g in others if g is not None), gradients, strict=True))
    errors = {"leak": error(found["stock"]()[0], expected), "output": error(output, expected), "gradients": worst}
    assert errors["leak"] > LEAK, errors
    assert max(errors["output"], worst) < TOLERANCE, errors
    return errors


def main() -> None:
    parser = interleave.parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types")
    options = parser.parse_args()
    where = interleave.begin(options)
    documents = workload.filling(options.tokens, LENGTHS, options.seed)
    results = {}
    for name, (model_type, _, goal, dimensions) in MIXERS.items():
        if options.only and model_type not in options.only:
            continue
        found = arms(name, documents, options)
        errors = check(found)
        times = interleave.interleave(found, options.rounds, report=None)
        ratios = {arm: 1 / of["median"] for arm, of in interleave.speeds(times, "autopack").items()}
        results[name] = {"dimensions": dimensions, "goal": goal, "errors": errors, "seconds": times, "ratios": ratios}
        print(row(name, results[name]), flush=True)
    result = interleave.result_of("mixers", options, where, documents=documents, mixers=results)
    interleave.write(options.json, result, describe(result))


def row(name: str, result: dict[str, Any]) -> str:
    """Return one mixer in one line."""
    ratios, errors = result["ratios"], result["errors"]
    goal = "" if result["goal"] is None else f"{result['goal']:.2f}"
    times = "".join(f"{1000 * result['seconds'][arm]['median']:>12.1f}" for arm in ("stock", "one by one", "autopack"))
    compared = f"{ratios['stock']:>12.2f}{goal:>7}{ratios['one by one']:>12.2f}"
    return f"{name:<22}{times}{compared}{max(errors['output'], errors['gradients']):>10.0e}"


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as a table."""
    settings, documents = result["settings"], result["documents"]
    lengths = f"{sum(documents)} tokens in {len(documents)} documents of {min(documents)} to {max(documents)}"
    yield f"Forward and backward of one mixer, {settings['hidden']} channels, fp32; {lengths}"
    yield from (f"Milliseconds, medians of {settings['rounds']} interleaved rounds", "")
    yield f"{'':<22}{'stock,':>12}{'one':>12}{'':>12}{'stock /':>12}{'':>7}{'one by one':>12}{'largest':>10}"
    head = f"{'mixer':<22}{'leaking':>12}{'by one':>12}{'autopack':>12}{'autopack':>12}{'goal':>7}"
    yield f"{head}{'/ autopack':>12}{'error':>10}"
    yield from (row(name, found) for name, found in result["mixers"].items())
    yield from ("", "Goals: stock / autopack as given; one by one / autopack at least 1 for all.")


if __name__ == "__main__":
    main()
