"""One training step on a padded batch: stock, and enabled, where the batch runs as one packed row inside.

    python -m benchmarks.unpadding                                      16 documents, about five minutes on two cores
    python -m benchmarks.unpadding --documents 4 --layers 1 --rounds 2  a first look
    python -m benchmarks.unpadding --json benchmarks/results/unpadding.json

The arms, each on a copy of the same Llama, with the same documents, labels and optimizer:

* `stock`: sdpa and a right-padded batch with its 0/1 mask, as any collator makes it; labels are -100 at padding.
* `enabled`: `autopack.enable(model)` and the same call. Logits are not read, as in `Trainer`.
* `logits read`: the same, but the logits are padded again, and kept until the backward pass is over.
* `packed by hand`: the row that `PackingCollator` makes of the documents, on an enabled model, for comparison.

Before anything is timed, all arms must give the same loss and the same gradients.

Peak memory is what one step adds to the resident memory of a process that holds nothing but the arm's model and its
optimizer, after a first small step. Each arm has a process of its own for it, and there glibc has to give every tensor
above 64 KiB back as it is freed. With the settings of the timed arms the peak would be that of the heap and the holes
in it, and a matter of the order in which tensors come and go.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from itertools import islice
from typing import Any

from benchmarks import interleave, workload

ARMS = ("stock", "enabled", "logits read", "packed by hand")
GOAL = 0.9


def arms(
    options: argparse.Namespace, documents: list[int], names: tuple[str, ...] = ARMS
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """For each arm, its model and the arguments that it is called with."""
    import autopack

    ids = workload.tokens(sum(documents), options)
    batch = workload.padded(ids, ids, documents)
    row = autopack.PackingCollator()([{"input_ids": document} for document in ids[0].split(documents)])
    stock = workload.build(options, max(documents))
    found = {}
    for name in names:
        model = copy.deepcopy(stock)
        if name != "stock":
            autopack.enable(model)
        found[name] = (model, row if name == "packed by hand" else batch)
    return found


def step(name: str, model: Any, call: dict[str, Any], steps: int) -> Any:
    """The arm of this name, to be run."""
    return workload.step(model, call, steps, read_logits if name == "logits read" else workload.backward)


def read_logits(model: Any, call: dict[str, Any]) -> None:
    """Forward and backward, reading the logits between them."""
    output = model(**call)
    assert output.logits.shape[:2] == call["input_ids"].shape
    output.loss.backward()


def measure_peak(name: str, options: argparse.Namespace, documents: list[int]) -> dict[str, float]:
    """What a step of one arm adds to this process, in MiB: what was resident before, the peak, and what was added."""
    ((model, call),) = arms(options, documents, (name,)).values()
    run = step(name, model, call, steps=1)
    run({key: value[:, : workload.SHORTEST] if hasattr(value, "shape") else value for key, value in call.items()})
    before = interleave.resident("VmRSS")
    run()
    peak = interleave.resident("VmHWM")
    return {"before": before, "peak": peak, "added": peak - before}


def measure_peaks() -> dict[str, dict[str, float]]:
    """The peaks of all arms, each in a process of its own; empty where the system does not tell."""
    if not interleave.STATUS.exists():
        return {}
    found = {}
    for name in ARMS:
        found[name] = interleave.elsewhere(*sys.orig_argv[1:], "--peak-of", name, **interleave.GIVEN_BACK)
        print(f"peak memory, {name}: {found[name]['added']:.0f} MiB", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    workload.add_arguments(parser, rounds=3)
    options = parser.parse_args()
    documents = list(islice(workload.lengths(options.seed), options.documents))
    if options.peak_of is not None:
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(measure_peak(options.peak_of, options, documents)))
        return
    where = interleave.begin(options)
    peaks = measure_peaks()
    prepared = arms(options, documents)
    losses, gradient_error = workload.check(prepared)
    runs = {name: step(name, model, call, options.steps) for name, (model, call) in prepared.items()}
    times = interleave.interleave(runs, options.rounds)
    result = {
        "benchmark": "unpadding",
        "origin": where,
        "settings": workload.settings(options),
        "documents": documents,
        "losses": losses,
        "largest gradient error": gradient_error,
        "seconds": times,
        "peak memory, MiB": peaks,
        "padded / real tokens": len(documents) * max(documents) / sum(documents),
        "speed of stock": {
            key: {name: times["stock"][key] / of[key] for name, of in times.items()} for key in interleave.STATISTICS
        },
    }
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    settings, documents, times = result["settings"], result["documents"], result["seconds"]
    peaks, ratio, speeds = result["peak memory, MiB"], result["padded / real tokens"], result["speed of stock"]
    real = sum(documents)
    lines = [
        interleave.heading(result["origin"]),
        "",
        f"One training step, Llama, {settings['layers']} layers x {settings['hidden']}, {settings['heads']} heads, "
        f"vocabulary {settings['vocabulary']}, fp32, AdamW",
        f"{real} tokens in {len(documents)} documents of {min(documents)} to {max(documents)}; padded "
        f"{len(documents)} x {max(documents)} = {len(documents) * max(documents)} tokens",
        f"{settings['rounds']} interleaved rounds of {settings['steps']}; losses agree within "
        f"{workload.LOSS_TOLERANCE:.0e}, gradients within {result['largest gradient error']:.0e}",
        "",
        f"{'arm':<16}{'median s':>11}{'min s':>11}{'cpu s':>11}{'tokens/s':>11}{'peak MiB':>11}",
    ]
    for name, found in times.items():
        peak = f"{peaks[name]['added']:>11.0f}" if peaks else f"{'-':>11}"
        speed = real * settings["steps"] / found["median"]
        lines.append(f"{name:<16}{interleave.cells(found, '>11.3f')}{speed:>11.0f}{peak}")
    lines += ["", f"{'speed / stock':<16}{'of medians':>11}{'of minima':>11}{'of cpu':>11}{'/ tokens':>11}"]
    for name in ARMS[1:]:
        cells = [speeds[key][name] for key in interleave.STATISTICS]
        lines.append(f"{name:<16}" + "".join(f"{cell:>11.3f}" for cell in [*cells, cells[0] / ratio]))
    lines += [
        "",
        f"tokens/s are real tokens. Padded / real tokens: {ratio:.3f}; the last column is the speed ratio over it.",
        f"Goals: enabled at least {GOAL} in the last column; peak memory of enabled at most that of stock.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
