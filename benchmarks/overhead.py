"""What enabling costs where nothing is packed, and what `enable` itself costs.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --json benchmarks/results/overhead.json

Forward and backward of one and the same Llama on an unpacked batch of 4 x 256 tokens, called in four ways. Arms:

* `stock`: autopack is imported and does nothing.
* `enabled`: `autopack.enable(model)`.
* `beside`: another model is enabled, so this one meets autopack's functions at transformers' places, inert.

Models are enabled and disabled, and called once on a few columns, outside the time that is taken; the arms of a round
follow each other at once. What is reported is the median over rounds of an arm's ratio to stock *in that round*, with
the interval that holds it in 95 of 100 bootstraps of the rounds: on a shared machine single rounds scatter by several
percent. `beside` shows how far from 1 two arms come out that run the same code but for a few `if`s.

`calls of a tiny model` is the same cost as a number: the forward of one layer on 8 tokens, which hides nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import interleave

MODELS = {"small": (4, 128), "medium": (8, 512)}
"""Layers and hidden size."""
ROWS, COLUMNS, VOCABULARY = 4, 256, 1024


def build(layers: int, hidden: int) -> Any:
    """A random Llama on sdpa."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()


def calls() -> dict[str, dict[str, Any]]:
    """The ways of calling a model with an unpacked batch."""
    import torch

    ids = torch.randint(VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    positions = torch.arange(COLUMNS).expand(ROWS, COLUMNS).contiguous()
    return {
        "plain": batch,
        "mask": {**batch, "attention_mask": torch.ones_like(ids)},
        "positions": {**batch, "position_ids": positions},
        "mask and positions": {**batch, "attention_mask": torch.ones_like(ids), "position_ids": positions},
    }


def measure_calls(model: Any, call: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Times of the three arms."""
    import autopack

    other = build(1, 64)
    states: dict[str, Any] = {"stock": None, "enabled": model, "beside": other}
    times = {name: interleave.Times() for name in states}

    def run(call: dict[str, Any] = call) -> None:
        model(**call).loss.backward()
        model.zero_grad()

    few = {name: tensor[:, :8].contiguous() for name, tensor in call.items()}
    run()
    gc.collect()
    gc.disable()  # a collection would fall to one arm or another
    names = list(states)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            enabled = states[name]
            if enabled is not None:
                autopack.enable(enabled)
            run(few)
            times[name].run(run)
            if enabled is not None:
                autopack.disable(enabled)
    gc.enable()
    return {name: found.summary() for name, found in times.items()}


def measure_tiny(rounds: int, calls_at_a_time: int = 100) -> dict[str, float]:
    """Microseconds of a forward of the tiny model, by arm, and what enabling adds: medians over rounds."""
    import torch

    import autopack

    model, ids = build(1, 64).eval(), torch.arange(8)[None]
    times: dict[str, list[float]] = {"stock": [], "enabled": []}

    def run() -> float:
        start = time.perf_counter()
        for _ in range(calls_at_a_time):
            model(input_ids=ids)
        return (time.perf_counter() - start) / calls_at_a_time * 1e6

    with torch.no_grad():
        for _ in range(rounds):
            times["stock"].append(run())
            autopack.enable(model)
            model(input_ids=ids)
            times["enabled"].append(run())
            autopack.disable(model)
    added = [of - stock for of, stock in zip(times["enabled"], times["stock"], strict=True)]
    return {**{name: statistics.median(found) for name, found in times.items()}, "added": statistics.median(added)}


def ratio(times: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    """The median of an arm's ratios to stock, round by round, and the 95 % interval of its bootstrap."""
    import numpy

    found = numpy.asarray(times["wall"]) / numpy.asarray(stock["wall"])
    draws = numpy.random.default_rng(0).choice(found, (4000, len(found)))
    low, high = numpy.quantile(numpy.median(draws, axis=1), (0.025, 0.975))
    return {"median": float(numpy.median(found)), "low": float(low), "high": float(high)}


def measure_enable(model: Any, rounds: int, verify: bool) -> dict[str, Any]:
    """Times of `enable`, the first of this model and later ones, and of `disable`."""
    import autopack

    times = interleave.Times()
    taken = interleave.Times()
    for _ in range(rounds):
        times.run(lambda: autopack.enable(model, verify=verify))
        taken.run(lambda: autopack.disable(model))
    return {"first": times.wall[0], **times.summary(), "disable median": taken.summary()["median"]}


def measure_enables(rounds: int) -> dict[str, dict[str, Any]]:
    """`enable` on models of few and of many modules; the first of the process pays for caches."""
    from autopack import tiny

    models: dict[str, Callable[[], Any]] = {
        "tiny": lambda: tiny.build("llama", attn_implementation="sdpa"),
        "24 layers": lambda: build(24, 64),
    }
    found = {}
    for name, make in models.items():
        model = make()
        found[name] = measure_enable(model, rounds, verify=False)
    found["tiny, verified"] = measure_enable(models["tiny"](), max(3, rounds // 10), verify=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the medium model; small ones: 6 x")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")
    options = parser.parse_args()
    interleave.keep_freed_memory()

    import torch

    torch.set_num_threads(options.threads)
    where = interleave.origin()
    build(1, 64)  # transformers' own imports
    imports = interleave.Times()
    imports.run(lambda: import_module("autopack.enabling.enable"))
    start = time.perf_counter()
    enables = measure_enables(30)
    tiny_calls = measure_tiny(3 * options.rounds)
    found: dict[str, Any] = {}
    for name in options.models:
        model = build(*MODELS[name])
        rounds = options.rounds if name == "medium" else 6 * options.rounds
        for kind, call in calls().items():
            found[f"{name}, {kind}"] = measure_calls(model, call, rounds)
            print(f"{time.perf_counter() - start:.0f} s: {name}, {kind}", flush=True)
    result = {
        "benchmark": "overhead",
        "origin": where,
        "settings": {"rows": ROWS, "columns": COLUMNS, "models": MODELS, "rounds": options.rounds},
        "import": imports.summary(),
        "enable": enables,
        "calls of a tiny model": tiny_calls,
        "calls": found,
        "ratios": {
            kind: {arm: ratio(times[arm], times["stock"]) for arm in ("enabled", "beside")}
            for kind, times in found.items()
        },
    }
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = [
        interleave.heading(result["origin"]),
        "",
        f"Imports of autopack.enable, beside torch and transformers: {result['import']['median'] * 1000:.0f} ms",
        "",
        "enable() and disable(), milliseconds",
        f"{'model':<30}{'first':>9}{'median':>9}{'min':>9}{'disable':>9}",
    ]
    for name, times in result["enable"].items():
        cells = (times[key] * 1000 for key in ("first", "median", "min", "disable median"))
        lines.append(f"{name:<30}" + "".join(f"{cell:>9.1f}" for cell in cells))
    tiny_calls = result["calls of a tiny model"]
    lines += [
        "",
        f"Forward of a tiny model on 8 tokens: {tiny_calls['stock']:.0f} us; enabling adds {tiny_calls['added']:.0f}",
        "",
        f"Forward and backward of an unpacked batch, {ROWS} x {COLUMNS} tokens: milliseconds, and ratios to stock, "
        "medians over rounds (95 % interval)",
        f"{'model, call':<30}{'stock':>9}" + "".join(f"{arm:>24}" for arm in ("enabled", "beside")),
    ]
    for kind, times in result["calls"].items():
        line = f"{kind:<30}{times['stock']['median'] * 1000:>9.2f}"
        for arm in ("enabled", "beside"):
            found = result["ratios"][kind][arm]
            line += f"{found['median']:>9.3f} ({found['low']:.3f}-{found['high']:.3f})"
        lines.append(line)
    lines += ["", "Goals: enabled at most 1.02; enable() without verification at most 50 ms."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
