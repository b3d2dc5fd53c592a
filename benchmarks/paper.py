"""The paper's comparison on this machine: padding, FixedLengthPacking and MiniBatchPacking, with and without PosID.

    python -m benchmarks.paper                                       both length distributions, about ten minutes
    python -m benchmarks.paper --data flan --documents 200 --rounds 1            a first look
    python -m benchmarks.paper --device cuda --model 1b                          a Llama of 1B in bfloat16, full lengths
    python -m benchmarks.paper --json benchmarks/results/paper.json
    python -m benchmarks.paper --full --json benchmarks/results/paper_full.json    undivided lengths, half an hour

After "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv 2407.09105). The arms, each from the
same weights, on the same documents, in the same order as far as they keep one:

* `padding`: mini-batches of `--batch-size` documents, padded to the longest; stock.
* `padding, sorted`: the same, with documents of like length in a mini-batch (`group_by_length` of Trainer); stock.
* `FixedLength`: all documents end to end, cut every `--max-length` tokens, `--batch-size` rows per step; stock. Nothing
  says where documents begin: they see each other, and are cut.
* `FixedLength + PosID`: the same rows with positions that restart; enabled.
* `offline rows + PosID`: rows of as many documents as `batch size x max length` tokens hold; enabled.
* `multipack + PosID`: `batch size` bins of `max length` tokens, filled by first-fit decreasing; enabled.
* `MiniBatch + PosID`: the mini-batches of `padding`, each as one packed row (`PackingCollator`); enabled.

Every arm trains for one epoch, and on through further epochs to the number of steps that padding takes in one
(or `--steps`), with a constant learning rate. Validation is always on padded batches by a stock model. Peak memory is
that of the largest step of an epoch, by torch's allocator. Speeds are measured afterwards, arm by arm in turn, on an
epoch of the first `--timed` documents. What several devices would wait for is counted, not measured: columns of
mini-batches over as many documents as the paper has, eight at a time, of which the largest is waited for.

`--full` takes the paper's lengths undivided, in rows of 4096, on a model of which a step is mostly arithmetic, and one
epoch alone. `--trial` makes it a matter of seconds; no time of that means anything.

A JSON file holds every arm and every round as soon as it is measured. After `--minutes` nothing more is begun, and the
exit status is 3; the same command goes on. Delete the file to measure anew. The command fails (exit status 1) unless
losses of MiniBatchPacking are those of padding to three digits, with `--full` in every step, and, without it,
FixedLengthPacking with PosID validates no worse than without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from autopack.bench.subjects import DISTRIBUTIONS
from benchmarks import interleave
from benchmarks.paper_arms import ARMS, PADDING, load
from benchmarks.paper_table import checks, describe, speed_of, waits
from benchmarks.paper_training import MODELS, shape_of, time_rounds, train

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"scale": 8, "documents": 800, "dtype": "float32", "model": "tiny", "timed": 256, "rounds": 3},
    "cuda": {"scale": 1, "documents": 2000, "dtype": "bfloat16", "model": "tiny", "timed": 256, "rounds": 3},
    "full": {"scale": 1, "documents": 240, "dtype": "float32", "model": "small", "timed": 96, "rounds": 3},
    "trial": {"scale": 16, "documents": 12, "dtype": "float32", "model": "tiny", "timed": 8, "rounds": 1},
}
LEARNING_RATES = {"tiny": 1e-3, "small": 1e-3, "1b": 3e-4, "7b": 3e-4}
UNFINISHED = 3
"""The exit status where there was no time for all that is to be measured."""
LONGEST = 4096
"""Tokens of the paper's rows; divided by `--scale`, as the documents are."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with what depends on the device and the model filled in."""
    parser = interleave.parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    parser.add_argument("--scale", type=int, help="divide all lengths by this (8; on CUDA and full 1)")
    about = "for training, an eighth more for validation (800; on CUDA 2000; full 240)"
    parser.add_argument("--documents", type=int, help=about)
    parser.add_argument("--max-length", type=int, help="the most tokens of a document and of a row (4096 / scale)")
    parser.add_argument("--batch-size", type=int, default=4, help="documents of a mini-batch (4)")
    parser.add_argument("--steps", type=int, help="compare losses at this step too (padding's steps of an epoch)")
    parser.add_argument("--model", choices=list(MODELS), help="(tiny; full small)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(float32; on CUDA bfloat16)")
    parser.add_argument("--attn", default="sdpa", help="attn_implementation of the model (sdpa)")
    parser.add_argument("--learning-rate", type=float, help="(1e-3; of 1b 3e-4)")
    parser.add_argument("--timed", type=int, help="documents of a round of timing (256; full 96)")
    parser.add_argument("--full", action="store_true", help="the paper's own lengths; see above")
    parser.add_argument("--trial", action="store_true", help="with --full: everything small")
    parser.add_argument("--minutes", type=float, default=40, help="begin nothing after so long (40)")
    options = parser.parse_args(arguments)
    if options.trial and not options.full:
        parser.error("--trial: wanted --full beside it")
    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    if options.full:
        kind = "trial" if options.trial else "full"
    for name, value in DEFAULTS[kind].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("scale", "documents", "batch_size", "timed", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: wanted at least 1")
    options.max_length = options.max_length or max(LONGEST // options.scale, 2)
    options.learning_rate = options.learning_rate or LEARNING_RATES[options.model]
    return options


def run(options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any] | None:
    """Train and time all arms on all data, but what the JSON file has already; return the result with its checks.

    Return None where `--minutes` are over before all is measured.
    """
    result = begun(options, where)
    last, end = time.monotonic(), time.monotonic() + 60 * options.minutes

    def keep() -> None:
        nonlocal last
        result["seconds"] += time.monotonic() - last
        last = time.monotonic()
        if options.json is not None:
            interleave.put(options.json, json.dumps(result, indent=1) + "\n")

    for name in options.data:
        corpus, shape = load(name, options), shape_of(options)
        data = result["data"].setdefault(name, {"trained": {}, "rounds": []})
        data |= {"origin": corpus.origin, "documents": len(corpus.train), "tokens": int(corpus.lengths.sum())}
        data |= {"held out": len(corpus.validation), "timed tokens": int(corpus.lengths[: options.timed].sum())}
        steps = {arm: len(way.choose(corpus.lengths, shape, 0)) for arm, way in ARMS.items()}
        common = options.steps or (min(steps.values()) if options.full else steps[PADDING])
        for arm in [arm for arm in ARMS if arm not in data["trained"]]:
            if time.monotonic() >= end:
                keep()
                return None
            print(f"{name}: {arm}", flush=True)
            data["trained"][arm] = train(ARMS[arm], corpus, options, common).summary(common)
            keep()
        if len(data["rounds"]) < options.rounds and not time_rounds(corpus, options, data["rounds"], end, keep):
            keep()
            return None
        data["arms"] = {arm: data["trained"][arm] | speed_of(data, arm) for arm in ARMS}
        data["waits"] = waits(name, options) if name in DISTRIBUTIONS else {}
    result["checks"] = checks(result)
    return result


def begun(options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier call has measured, or nothing yet; raise `ValueError` where that was something else."""
    own = json.loads(json.dumps(interleave.settings(options)))
    new = {"benchmark": "paper", "origin": where, "settings": own, "seconds": 0.0, "data": {}}
    path = options.json
    if path is None or not path.exists():
        return new
    found = json.loads(path.read_text())
    names = ("torch", "transformers", "device", "cores", "threads")
    now, then = ({**of["settings"], **{name: of["origin"].get(name) for name in names}} for of in (new, found))
    for name in sorted({*now, *then}):
        if now.get(name) != then.get(name):
            said = f"its {name} is {then.get(name)!r}, wanted {now.get(name)!r}"
            raise ValueError(f"{path}: {said}; delete it, or name another file")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print and write; exit with 1 unless all checks pass."""
    options = parse(arguments)
    where = interleave.begin(options)
    if options.device.startswith("cuda"):
        import torch

        where["device"] = torch.cuda.get_device_name(options.device)
    result = run(options, where)
    if result is None:
        print(f"{options.minutes:g} minutes are over; the same command goes on from {options.json}", flush=True)
        sys.exit(UNFINISHED)
    print()
    interleave.write(options.json, result, describe(result))
    if not all(passed for passed, _ in result["checks"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
