"""What enabling costs where nothing is packed, and what `enable` itself costs.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --json benchmarks/results/overhead.json

Forward and backward of one and the same Llama on an unpacked batch of 4 x 256 tokens, called in four ways. Arms:

* `stock`: autopack is imported and does nothing.
* `enabled`: `autopack.enable(model)`.
* `beside`: another model is enabled, so this one meets autopack's functions at transformers' places, inert.

Models are enabled and disabled outside the time that is taken, and the arms of a round follow each other at once.
"""

from __future__ import annotations

import argparse
import gc
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

    def run() -> None:
        model(**call).loss.backward()
        model.zero_grad()

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
            times[name].run(run)
            if enabled is not None:
                autopack.disable(enabled)
    gc.enable()
    return {name: found.summary() for name, found in times.items()}


def measure_enable(model: Any, rounds: int, verify: str) -> dict[str, Any]:
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
        found[name] = measure_enable(model, rounds, "never")
    found["tiny, verified"] = measure_enable(models["tiny"](), max(3, rounds // 10), "always")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the medium model; small ones: 4 x")
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
    found: dict[str, Any] = {}
    for name in options.models:
        model = build(*MODELS[name])
        rounds = options.rounds if name == "medium" else 4 * options.rounds
        for kind, call in calls().items():
            found[f"{name}, {kind}"] = measure_calls(model, call, rounds)
            print(f"{time.perf_counter() - start:.0f} s: {name}, {kind}", flush=True)
    result = {
        "benchmark": "overhead",
        "origin": where,
        "settings": {"rows": ROWS, "columns": COLUMNS, "models": MODELS, "rounds": options.rounds},
        "import": imports.summary(),
        "enable": enables,
        "calls": found,
        "ratios": {
            kind: {arm: times[arm]["median"] / times["stock"]["median"] for arm in ("enabled", "beside")}
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
    lines += [
        "",
        f"Forward and backward of an unpacked batch, {ROWS} x {COLUMNS} tokens: milliseconds, and ratios to stock of "
        f"median, minimum and processor time",
        f"{'model, call':<30}{'stock':>9}" + "".join(f"{arm:>9}{'min':>8}{'cpu':>8}" for arm in ("enabled", "beside")),
    ]
    for kind, times in result["calls"].items():
        line = f"{kind:<30}{times['stock']['median'] * 1000:>9.2f}"
        for arm, width in (("enabled", 9), ("beside", 9)):
            values = [times[arm][key] / times["stock"][key] for key in ("median", "min", "cpu median")]
            line += f"{values[0]:>{width}.3f}{values[1]:>8.3f}{values[2]:>8.3f}"
        lines.append(line)
    lines += ["", "Goals: enabled at most 1.02; enable() without verification at most 50 ms."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
