"""One training step on a packed row: stock, hand-written per-document attention, autopack.

    python -m benchmarks.training_step                                  T = 8192, ten minutes on two cores
    python -m benchmarks.training_step --tokens 2048 --rounds 3         a first look
    python -m benchmarks.training_step --tokens 2048 --each 32          many short documents, all alike
    python -m benchmarks.training_step --tokens 2048 --mean 32          many short documents of many lengths
    python -m benchmarks.training_step --json benchmarks/results/training_step.json

The arms, each on a copy of the same Llama, with the same documents, labels and optimizer:

* `stock`: sdpa, `use_cache=False`, restarting `position_ids`, no mask: the one call that transformers 5.23 gets right
  on this model, by a dense mask over the whole row.
* `by hand`: an attention function of this file that loops over the documents. What autopack is held against.
* `autopack`: `autopack.enable(model)` and a plain call.
* `padded` (with --padded): the documents as a right-padded batch.

Before anything is timed, all arms must give the same loss and the same gradients. Peak memory is that of a step, by
torch's allocator, parameters and the optimizer's states included.
"""

from __future__ import annotations

import argparse
import copy
import random
from itertools import count
from typing import Any

from autopack.bench.machine import kept_by, peak_memory
from benchmarks import interleave, workload


def documents_of(tokens: int, seed: int, each: int | None = None, mean: int | None = None) -> list[int]:
    """Lengths of documents that fill a row of `tokens`; the last one is cut to fit.

    All of `each` tokens where that is given; of a half to one and a half of `mean` where that is.
    """
    drawn, shortest = workload.lengths(seed), workload.SHORTEST
    if each or mean:
        shortest, longest = (each, each) if each else (mean // 2, mean * 3 // 2)
        generator = random.Random(seed)
        drawn = (generator.randint(shortest, longest) for _ in count())
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        found.append(min(next(drawn), left))
    if found[-1] < shortest and len(found) > 1:  # no document shorter than the shortest
        found[-2:] = [found[-2] + found[-1]]
    return found


def by_hand(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, documents: list[int], scaling: float, **_: Any
) -> Any:
    """Per-document attention as one would write it for this model alone."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = zip(*(states.split(documents, dim=2) for states in (query, key, value)), strict=True)
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register_by_hand() -> None:
    """Make `by_hand` an attention implementation, without a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("by_hand", by_hand)
    AttentionMaskInterface.register("by_hand", lambda *_, **__: None)


def arms(options: argparse.Namespace, documents: list[int]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """For each arm, its model and the arguments that it is called with."""
    import torch

    import autopack

    register_by_hand()
    ids = workload.tokens(sum(documents), options)
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    labels = ids.masked_fill(positions == 0, -100)
    row = {"input_ids": ids, "position_ids": positions, "labels": labels}

    stock = workload.build(options, options.tokens)
    hand, enabled = copy.deepcopy(stock), copy.deepcopy(stock)
    hand.set_attn_implementation("by_hand")
    autopack.enable(enabled)
    found = {
        "stock": (stock, {**row, "use_cache": False}),
        "by hand": (hand, {**row, "use_cache": False, "documents": documents}),
        "autopack": (enabled, row),
    }
    if options.padded:
        found["padded"] = (copy.deepcopy(stock), workload.padded(ids, labels, documents))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--padded", action="store_true", help="time the padded batch too")
    parser.add_argument("--each", type=int, help="tokens of every document, instead of lengths of many sizes")
    parser.add_argument("--mean", type=int, help="mean tokens of a document, from half to one and a half of it")
    workload.add_arguments(parser, rounds=15)
    options = parser.parse_args()
    where = interleave.begin(options)
    documents = documents_of(options.tokens, options.seed, options.each, options.mean)
    prepared = arms(options, documents)
    losses, gradient_error = workload.check(prepared)
    runs = {name: workload.step(model, call, options.steps) for name, (model, call) in prepared.items()}
    times = interleave.interleave(runs, options.rounds)
    peaks = {name: peak(model, call) for name, (model, call) in prepared.items()}
    result = {
        "benchmark": "training_step",
        "origin": where,
        "settings": workload.settings(options),
        "documents": documents,
        "losses": losses,
        "largest gradient error": gradient_error,
        "seconds": times,
        "peak bytes": peaks,
        "ratios": {key: ratios(times, key) for key in interleave.STATISTICS},
    }
    interleave.write(options.json, result, describe(result))


def peak(model: Any, call: dict[str, Any]) -> int:
    """The most bytes of tensors during a step, after one that makes the optimizer's states."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        workload.backward(model, call)
        optimizer.step()
        optimizer.zero_grad()

    update()
    return peak_memory(update, kept_by(model, optimizer, call), "cpu")


def ratios(times: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """How many times faster autopack is than the others, and its time in hand-written ones."""
    found = {
        "stock / autopack": times["stock"][key] / times["autopack"][key],
        "autopack / by hand": times["autopack"][key] / times["by hand"][key],
    }
    if "padded" in times:
        found["padded / autopack"] = times["padded"][key] / times["autopack"][key]
    return found


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    settings, documents, times = result["settings"], result["documents"], result["seconds"]
    lines = [
        interleave.heading(result["origin"]),
        "",
        f"One training step, Llama, {settings['layers']} layers x {settings['hidden']}, {settings['heads']} heads, "
        f"vocabulary {settings['vocabulary']}, fp32, AdamW",
        f"{sum(documents)} tokens in {len(documents)} documents of {min(documents)} to {max(documents)}, "
        f"{settings['rounds']} interleaved rounds of {settings['steps']}",
        "",
        f"{'arm':<22}{'median s':>11}{'min s':>11}{'cpu s':>11}{'tokens/s':>11}{'peak MiB':>11}",
        *(
            f"{name:<22}{interleave.cells(t, '>11.3f')}"
            f"{sum(documents) * settings['steps'] / t['median']:>11.0f}{result['peak bytes'][name] / 2**20:>11.0f}"
            for name, t in times.items()
        ),
        "",
        f"{'ratio':<22}{'of medians':>11}{'of minima':>11}{'of cpu':>11}",
        *(
            f"{name:<22}" + "".join(f"{of[name]:>11.3f}" for of in result["ratios"].values())
            for name in result["ratios"]["median"]
        ),
        "",
        "Goals: stock / autopack at least 3.0 at 8192 tokens, autopack / by hand at most 1.03, in no more memory.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
