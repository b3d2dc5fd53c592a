"""The paper's comparison on this machine: padding, FixedLengthPacking and MiniBatchPacking, with and without PosID.

    python -m benchmarks.paper                                       both length distributions, about ten minutes
    python -m benchmarks.paper --data flan --documents 200 --rounds 1            a first look
    python -m benchmarks.paper --text corpus.jsonl --tokenizer words             text of one's own
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
epoch of the first `--timed` documents.

`--full` takes the paper's lengths undivided, in rows of 4096, on a model of which a step is mostly arithmetic, and one
epoch alone (benchmarks.paper_full). It keeps in its JSON what it has measured, stops after `--minutes` with exit status
3, and goes on when it is called again. `--trial` makes it a matter of seconds; no time of that means anything.

The command fails (exit status 1) unless losses of MiniBatchPacking are those of padding to three digits, and
FixedLengthPacking with PosID validates no worse than without.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopack.bench.subjects import DISTRIBUTIONS
from benchmarks import interleave, paper_full
from benchmarks.paper_arms import ARMS, PADDING
from benchmarks.paper_data import load
from benchmarks.paper_table import checks, describe, draw
from benchmarks.paper_training import MODELS, shape_of, speeds, train

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"scale": 8, "documents": 800, "dtype": "float32", "model": "tiny", "timed": 256, "rounds": 3},
    "cuda": {"scale": 1, "documents": 2000, "dtype": "bfloat16", "model": "tiny", "timed": 256, "rounds": 3},
    "full": {"scale": 1, "documents": 240, "dtype": "float32", "model": "small", "timed": 96, "rounds": 3},
    "trial": {"scale": 16, "documents": 12, "dtype": "float32", "model": "tiny", "timed": 8, "rounds": 1},
}
LEARNING_RATES = {"tiny": 1e-3, "small": 1e-3, "1b": 3e-4}
UNFINISHED = 3
"""The exit status where `--full` had no time for all that it wants to measure."""
LONGEST = 4096
"""Tokens of the paper's rows; divided by `--scale`, as the documents are."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with what depends on the device and the model filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    parser.add_argument("--text", type=Path, help="train on this .jsonl or .txt file, or all in this folder, instead")
    parser.add_argument("--tokenizer", choices=("bytes", "words"), default="bytes", help="of --text (bytes)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of --tokenizer words (4096)")
    parser.add_argument("--scale", type=int, help="divide all lengths by this (8; on CUDA and full 1)")
    parser.add_argument(
        "--documents", type=int, help="for training, an eighth more for validation (800; on CUDA 2000; full 240)"
    )
    parser.add_argument("--max-length", type=int, help="the most tokens of a document and of a row (4096 / scale)")
    parser.add_argument("--batch-size", type=int, default=4, help="documents of a mini-batch (4)")
    parser.add_argument("--steps", type=int, help="compare losses at this step too (padding's steps of an epoch)")
    parser.add_argument("--model", choices=list(MODELS), help="(tiny; full small)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(float32; on CUDA bfloat16)")
    parser.add_argument("--attn", default="sdpa", help="attn_implementation of the model (sdpa)")
    parser.add_argument("--learning-rate", type=float, help="(1e-3; of 1b 3e-4)")
    parser.add_argument("--timed", type=int, help="documents of a round of timing (256; full 96)")
    parser.add_argument("--rounds", type=int, help="of timing (3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true", help="the paper's own lengths; see above")
    parser.add_argument("--trial", action="store_true", help="with --full: everything small")
    parser.add_argument("--minutes", type=float, default=40, help="with --full: begin nothing after so long (40)")
    parser.add_argument("--json", type=Path, help="where to write the result; a .txt goes beside it")
    parser.add_argument("--plot", type=Path, help="where to draw the result; needs matplotlib")
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
    if options.max_length is None:
        options.max_length = max(LONGEST // options.scale, 2)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.model]
    if options.text is not None:
        options.data = ["text"]
        if not options.text.exists():
            parser.error(f"--text: there is no {options.text}")
    return options


def run(options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    """Train and time all arms on all data; the result holds the checks too."""
    result: dict[str, Any] = {"benchmark": "paper", "origin": where, "settings": settings(options), "data": {}}
    for name in options.data:
        corpus = load(name, options)
        common = options.steps or len(ARMS[PADDING].choose(corpus.lengths, shape_of(options), 0))
        found: dict[str, dict[str, Any]] = {}
        for arm, way in ARMS.items():
            print(f"{name}: {arm}", flush=True)
            found[arm] = train(way, corpus, options, common).summary(common)
        print(f"{name}: speeds", flush=True)
        for arm, times in speeds(corpus, options).items():
            found[arm] |= times
        result["data"][name] = {
            "origin": corpus.origin,
            "documents": len(corpus.train),
            "tokens": int(corpus.lengths.sum()),
            "held out": len(corpus.validation),
            "arms": found,
        }
    result["checks"] = checks(result)
    return result


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on."""
    chosen = {name: value for name, value in vars(options).items() if name not in ("json", "plot", "minutes")}
    if not options.full:
        chosen = {name: value for name, value in chosen.items() if name not in ("full", "trial")}
    return {**chosen, "text": None if options.text is None else options.text.name}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print and write; exit with 1 unless all checks pass."""
    options = parse(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its starts and stops on stderr
    interleave.keep_freed_memory()

    import torch

    torch.set_num_threads(options.threads)
    where = interleave.origin()
    if options.device.startswith("cuda"):
        where["device"] = torch.cuda.get_device_name(options.device)
    if options.full:
        full = paper_full.run(options, where, settings(options))
        if full is None:
            sys.exit(UNFINISHED)
        result = full
    else:
        result = run(options, where)
    print()
    interleave.write(options.json, result, paper_full.describe(result) if options.full else describe(result))
    if options.plot is not None:
        draw(result, options.plot)
    if not all(passed for passed, _ in result["checks"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
