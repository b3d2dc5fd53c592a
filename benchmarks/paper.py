"""The paper's comparison on this machine: padding, FixedLengthPacking and MiniBatchPacking, with
and without PosID.

    python -m benchmarks.paper --json benchmarks/results/paper_full.json        half an hour on two cores
    python -m benchmarks.paper --scale 8 --model tiny --documents 800 --timed 256 --json benchmarks/results/paper.json
    python -m benchmarks.paper --device cuda --model 1b --dtype bfloat16        a Llama of 1B

After "Enhancing Training Efficiency Using Packing with Flash Attention" (arXiv 2407.09105). The
arms, each from the same weights, on the same documents, in the same order as far as they keep one:

* `padding`: mini-batches of `--batch-size` documents, padded to the longest; stock.
* `padding, sorted`: the same, with documents of like length in a mini-batch (`group_by_length` of
  Trainer); stock.
* `FixedLength`: all documents end to end, cut every `--max-length` tokens, `--batch-size` rows per
  step; stock. Nothing says where documents begin: they see each other, and are cut.
* `FixedLength + PosID`: the same rows with positions that restart; enabled.
* `offline rows + PosID`: rows of as many documents as `batch size x max length` tokens hold;
  enabled.
* `MiniBatch + PosID`: the mini-batches of `padding`, each as one packed row (`PackingCollator`);
  enabled.

Every arm trains for one epoch, with a constant learning rate. Validation is always on padded
batches by a stock model. Peak memory is that of the largest step, by torch's allocator. Speeds are
measured afterwards, arm by arm in turn, on an epoch of the first `--timed` documents. A JSON file
holds every arm as soon as it is measured. The command fails (exit status 1) unless losses of
MiniBatchPacking are those of padding to three digits in every step, and FixedLengthPacking with
PosID validates no worse than without."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from autopack.bench.race import Entrant, Spread, kept_by, peak_memory, wait_for
from autopack.bench.subjects import DISTRIBUTIONS
from benchmarks import interleave
from benchmarks.paper_arms import (
    ARMS,
    FIXED,
    FIXED_POSID,
    MINI_BATCH,
    MODELS,
    OFFLINE,
    PADDING,
    Corpus,
    Shape,
    build,
    padded,
    targets,
    whole,
)

PUBLISHED = {
    ("flan", FIXED): ("4.01..4.02", "1.01", "+0.177..+0.313"),
    ("flan", OFFLINE): ("4.06", "1.01", "+0.155"),
    ("flan", MINI_BATCH): ("1.89..1.96", "0.76..0.82", "-0.004..+0.000"),
    ("orcamath", MINI_BATCH): ("1.36..1.40", "0.94..0.95", "-"),
}
"""Of the paper, the least and greatest of its models: tokens per second and peak memory over
padding's, validation loss less padding's. FLAN_20k: Table 2 (Mistral-7B, Llama-2-7B,
Granite-8B-code; 8 x A100-80GB with FSDP, one epoch, at most 4096 tokens, mini-batches of 4 per
GPU). OrcaMath_20k: section 4."""
TOLERANCES = {"float32": 5e-4, "float64": 5e-4, "bfloat16": 5e-3}
"""Largest difference of a loss that counts as the same: three digits, and in bfloat16 what the
paper's own figures for padding and MiniBatchPacking differ by (Table 2: 0.000 to 0.004)."""
LEARNING_RATES = {"tiny": 1e-3, "small": 1e-3, "1b": 3e-4, "7b": 3e-4}
WARM_UP, EVALUATED = 10, 16


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = interleave.parser(__doc__, 3)
    parser.add_argument(
        "--data", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS)
    )
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--documents", type=int, default=240, help="for training (240)")
    parser.add_argument(
        "--max-length", type=int, help="the most tokens of a document and of a row (4096 / scale)"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="documents of a mini-batch (4)")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--timed", type=int, default=96, help="documents of a round of timing (96)")
    options = parser.parse_args(arguments)
    options.max_length = options.max_length or 4096 // options.scale
    options.learning_rate = LEARNING_RATES[options.model]
    return options


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its tensors on a device."""
    return {
        name: value.to(device) if hasattr(value, "to") else value for name, value in call.items()
    }


def update(model: Any, optimizer: Any, call: dict[str, Any]) -> Any:
    """Take an optimizer step; return the loss, (), without a wait for the device."""
    import torch

    loss = model(**call).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(name: str, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Train a new model on an epoch, and return what the tables show of it."""
    import torch

    arm, shape = ARMS[name], Shape.of(options)
    model = build(options, enabled=arm.enabled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses: list[float] = []
    calls = [
        arm.collate(corpus.train, pieces, shape) for pieces in arm.choose(corpus.lengths, shape)
    ]
    for step, call in enumerate(calls, 1):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, step / WARM_UP)
        losses.append(update(model, optimizer, on(options.device, call)).item())
    validation = evaluate(model, corpus, options)
    sizes = [call["input_ids"].numel() for call in calls]
    largest = on(options.device, calls[int(np.argmax(sizes))])
    peak = peak_memory(
        lambda: update(model, optimizer, largest),
        kept_by(model, optimizer, largest),
        options.device,
    )
    padding = 1 - float(corpus.lengths.sum() / sum(sizes))
    return {
        "steps": len(losses),
        "padding": padding,
        "losses": losses,
        "validation": validation,
        "peak bytes": peak,
    }


def evaluate(model: Any, corpus: Corpus, options: argparse.Namespace) -> float:
    """Return the validation loss of these weights in a stock model, on padded batches: the mean
    over all targets."""
    import torch

    stock = build(options).eval()
    stock.load_state_dict(model.state_dict())
    lengths = np.array([len(document) for document in corpus.validation])
    order = np.argsort(lengths, kind="stable")
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(order), EVALUATED):
            call = padded(
                corpus.validation,
                whole(lengths, order[first : first + EVALUATED]),
                Shape.of(options),
            )
            total += stock(**on(options.device, call)).loss.item() * targets(call)
            count += targets(call)
    return total / count


def time_arms(corpus: Corpus, options: argparse.Namespace) -> interleave.Times:
    """Return the times of an epoch of the first `--timed` documents, arm by arm in turn."""
    import torch

    lengths, shape = corpus.lengths[: options.timed], Shape.of(options)
    models = {enabled: build(options, enabled=enabled) for enabled in (False, True)}
    optimizers = {
        enabled: torch.optim.AdamW(model.parameters(), lr=1e-5) for enabled, model in models.items()
    }
    runs = {}
    for name, arm in ARMS.items():
        steps = arm.choose(lengths, shape)
        calls = [on(options.device, arm.collate(corpus.train, pieces, shape)) for pieces in steps]
        step = partial(update, models[arm.enabled], optimizers[arm.enabled])
        # the first call of an arm makes what stays
        step(min(calls, key=lambda call: call["input_ids"].numel()))
        epoch = partial(lambda step, calls: [step(call) for call in calls], step, calls)
        runs[name] = Entrant(epoch, wait=partial(wait_for, options.device))
    return interleave.interleave(runs, options.rounds)


def run(options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    """Train and time all arms on all data; return the result with its checks."""
    data: dict[str, Any] = {}
    result = interleave.result_of("paper", options, where, data=data)
    for name in options.data:
        corpus = Corpus.of(name, options)
        arms: dict[str, Any] = {}
        data[name] = {"tokens": int(corpus.lengths.sum()), "arms": arms}
        for arm in ARMS:
            print(f"{name}: {arm}", flush=True)
            arms[arm] = train(arm, corpus, options)
            if options.json is not None:
                interleave.put(options.json, json.dumps(result, indent=1) + "\n")
        times = time_arms(corpus, options)
        for arm, of in times.items():
            arms[arm]["seconds"] = of["wall"]
            arms[arm]["tokens per second"] = (
                int(corpus.lengths[: options.timed].sum()) / of["median"]
            )
    result["checks"] = list(checks(result))
    return result


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the whole result in lines."""
    settings = result["settings"]
    yield (
        f"Llama {settings['model']}, {settings['dtype']}, {settings['device']}; mini-batches of "
        f"{settings['batch_size']}, rows of {settings['max_length']}, lengths over "
        f"{settings['scale']}"
    )
    head = f"{'x':>6}{'paper':>12}"
    for name, data in result["data"].items():
        base = data["arms"][PADDING]
        yield from ("", f"{name}: {settings['documents']} documents, {data['tokens']:,} tokens")
        yield f"{'':<22}{'steps':>6}{'padding':>9}{'tokens/s':>10}{'x':>20}{'paper':>12}{'MiB':>8}{head}"
        for arm, found in data["arms"].items():
            speed, peak, _ = PUBLISHED.get((name, arm), "---")
            ratio = Spread.of(
                [a / b for a, b in zip(base["seconds"], found["seconds"], strict=True)]
            )
            spread = f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"
            memory = found["peak bytes"] / base["peak bytes"]
            yield (
                f"{arm:<22}{found['steps']:>6}{found['padding']:>9.1%}{found['tokens per second']:>10.0f}{spread:>20}"
                f"{speed:>12}{found['peak bytes'] / 2**20:>8.0f}{memory:>6.2f}{peak:>12}"
            )
        yield from ("", f"{'':<22}{'train':>9}{'validation':>12}{'+':>9}{'paper':>18}")
        for arm, found in data["arms"].items():
            more = found["validation"] - base["validation"]
            paper = PUBLISHED.get((name, arm), "---")[2]
            last = statistics.mean(found["losses"][-max(1, found["steps"] // 10) :])
            yield f"{arm:<22}{last:>9.4f}{found['validation']:>12.4f}{more:>+9.3f}{paper:>18}"
    yield from (
        "",
        (
            "x: over padding's; +: less padding's. Paper: arXiv 2407.09105v6, smallest to largest "
            "of its models. Tokens"
        ),
        (
            "are real ones. Peak memory holds parameters and the optimizer's states too. Training "
            "losses are those of the"
        ),
        "last tenth of the steps, over each arm's own targets; validation is by a stock model.",
        "",
        *(f"{'PASS' if passed else 'FAIL'}  {text}" for passed, text in result["checks"]),
    )


def checks(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield what has to hold, and whether it does."""
    tolerance = TOLERANCES[result["settings"]["dtype"]]
    for name, data in result["data"].items():
        padding, mini_batch, fixed, posid = (
            data["arms"][arm] for arm in (PADDING, MINI_BATCH, FIXED, FIXED_POSID)
        )
        pairs = zip(
            *([*of["losses"], of["validation"]] for of in (padding, mini_batch)), strict=True
        )
        most = max(abs(one - other) for one, other in pairs)
        what = (
            f"{name}: in each of {padding['steps']} steps and in validation the loss of "
            f"{MINI_BATCH} is padding's"
        )
        yield most <= tolerance, f"{what} within {tolerance:.0e}: {most:.1e} at most"
        less = posid["validation"] - fixed["validation"]
        yield less <= 0, f"{name}: {FIXED_POSID} validates no worse than {FIXED}: {less:+.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print and write; exit with 1 unless all checks pass."""
    options = parse(arguments)
    result = run(options, interleave.begin(options))
    print()
    interleave.write(options.json, result, describe(result))
    sys.exit(not all(passed for passed, _ in result["checks"]))


if __name__ == "__main__":
    main()
