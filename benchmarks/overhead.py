"""What enabling costs where nothing is packed, and what `enable` itself costs.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --json benchmarks/results/overhead.json

Forward and backward of one and the same Llama on an unpacked batch of 4 x 256 tokens, called in four ways. Arms:

* `stock`: autopack is imported and does nothing.
* `enabled`: `autopack.enable(model)`.
* `beside`: another model is enabled, so this one meets autopack's functions at transformers' places, inert.

Models are enabled and disabled, and called once on a few columns, outside the time that is taken; the arms of a round
follow each other at once. What is reported is the median over rounds of an arm's ratio to stock *in that round*, with
the interval that holds it with 95 % confidence: on a shared machine single rounds scatter by several
percent. `beside` shows how far from 1 two arms come out that run the same code but for a few `if`s.

`calls of a tiny model` is the same cost as a number: the forward of one layer on 8 tokens, which hides nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

from autopack.bench.race import Entrant, Spread
from benchmarks import interleave, workload

MODELS = {"small": (4, 128), "medium": (8, 512)}
"""Layers and hidden size."""
ROWS, COLUMNS, VOCABULARY = 4, 256, 1024


def build(layers: int, hidden: int) -> Any:
    """Return a random Llama on sdpa."""
    return workload.llama(layers, hidden, hidden // 64, VOCABULARY)


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

    few = {name: tensor[:, :8].contiguous() for name, tensor in call.items()}

    def run(call: dict[str, Any] = call) -> None:
        model(**call).loss.backward()
        model.zero_grad()

    states: dict[str, Any] = {"stock": nullcontext, "enabled": lambda: autopack.enable(model)}
    states["beside"] = partial(autopack.enable, build(1, 64))
    run()
    gc.collect()
    gc.disable()  # a collection would fall to one arm or another
    arms = {name: Entrant(run, state, lambda: run(few)) for name, state in states.items()}
    times = interleave.interleave(arms, rounds, None)
    gc.enable()
    return times


def measure_tiny(rounds: int, calls_at_a_time: int = 100) -> dict[str, float]:
    """Microseconds of a forward of the tiny model, by arm, and what enabling adds: medians over rounds."""
    import torch

    import autopack

    model, ids = build(1, 64).eval(), torch.arange(8)[None]

    def run() -> None:
        for _ in range(calls_at_a_time):
            model(input_ids=ids)

    arms = {
        "stock": Entrant(run),
        "enabled": Entrant(run, lambda: autopack.enable(model), lambda: model(input_ids=ids)),
    }
    with torch.no_grad():
        times = interleave.interleave(arms, rounds, None)
    found = {name: [1e6 / calls_at_a_time * wall for wall in of["wall"]] for name, of in times.items()}
    added = [of - stock for of, stock in zip(found["enabled"], found["stock"], strict=True)]
    return {**{name: statistics.median(of) for name, of in found.items()}, "added": statistics.median(added)}


def ratio(times: dict[str, Any], stock: dict[str, Any]) -> dict[str, float]:
    """Return the median of an arm's ratios to stock, round by round, and the interval that holds it."""
    return asdict(Spread.of([a / b for a, b in zip(times["wall"], stock["wall"], strict=True)]))


def measure_enable(model: Any, rounds: int, verify: bool) -> dict[str, Any]:
    """Times of `enable`, the first of this model and later ones, and of `disable`."""
    import autopack

    @contextmanager
    def taken_off() -> Iterator[None]:
        yield
        autopack.disable(model)

    arms = {
        "enable": Entrant(lambda: autopack.enable(model, verify=verify), taken_off),
        "disable": Entrant(lambda: autopack.disable(model), ready=lambda: autopack.enable(model, verify=False)),
    }
    times = interleave.interleave(arms, rounds, None)
    return {"first": times["enable"]["wall"][0], **times["enable"], "disable median": times["disable"]["median"]}


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
    parser = interleave.parser(__doc__, rounds=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="small ones: 6 x the rounds")
    options = parser.parse_args()
    where = interleave.begin(options)
    build(1, 64)  # transformers' own imports
    imports = interleave.interleave({"": lambda: import_module("autopack.enabling.enable")}, 1, None)[""]
    enables = measure_enables(30)
    tiny_calls = measure_tiny(3 * options.rounds)
    found: dict[str, Any] = {}
    for name in options.models:
        model = build(*MODELS[name])
        for kind, call in calls().items():
            found[f"{name}, {kind}"] = measure_calls(model, call, options.rounds * (1 if name == "medium" else 6))
            print(f"{name}, {kind}", flush=True)
    ratios = {
        kind: {arm: ratio(times[arm], times["stock"]) for arm in ("enabled", "beside")} for kind, times in found.items()
    }
    measured = {"import": imports, "enable": enables, "calls of a tiny model": tiny_calls, "calls": found}
    result = interleave.result_of("overhead", options, where, **measured, ratios=ratios)
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in a few lines."""
    yield f"Imports of autopack.enable, beside torch and transformers: {result['import']['median'] * 1000:.0f} ms"
    yield from ("", "enable() and disable(), milliseconds")
    yield f"{'model':<30}{'first':>9}{'median':>9}{'min':>9}{'disable':>9}"
    for name, times in result["enable"].items():
        cells = (times[key] * 1000 for key in ("first", "median", "min", "disable median"))
        yield f"{name:<30}" + "".join(f"{cell:>9.1f}" for cell in cells)
    tiny_calls = result["calls of a tiny model"]
    yield ""
    yield f"Forward of a tiny model on 8 tokens: {tiny_calls['stock']:.0f} us; enabling adds {tiny_calls['added']:.0f}"
    said = "milliseconds, and ratios to stock, medians over rounds (95 % interval)"
    yield from ("", f"Forward and backward of an unpacked batch, {ROWS} x {COLUMNS} tokens: {said}")
    yield f"{'model, call':<30}{'stock':>9}" + "".join(f"{arm:>24}" for arm in ("enabled", "beside"))
    for kind, times in result["calls"].items():
        found = result["ratios"][kind].values()
        ratios = "".join(f"{of['median']:>9.3f} ({of['low']:.3f}-{of['high']:.3f})" for of in found)
        yield f"{kind:<30}{times['stock']['median'] * 1000:>9.2f}{ratios}"
    yield from ("", "Goals: enabled at most 1.02; enable() without verification at most 50 ms.")


if __name__ == "__main__":
    main()
