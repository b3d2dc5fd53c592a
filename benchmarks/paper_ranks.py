"""Measure optimizer steps of the paper's eight GPUs, one rank after the other: padded, packed, and
cut by `max_tokens`.

    python -m benchmarks.paper_ranks --json benchmarks/results/paper_ranks.json

A step takes as long as its slowest rank; what ranks send each other is not in it. Padding,
MiniBatchPacking and `MiniBatch, regrouped` train on the same documents in each step, with one and
with four mini-batches of 4 per rank. Regrouped rows hold at most `--max-length` tokens and are
dealt by `autopack.steps.deal`, as `enable(trainer, max_tokens=...)` deals them. Offline rows hold
`--max-length` tokens each, one a rank. All arms run their step 1, then all their step 2, and so on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopack.packing.strategies import CostModel
from autopack.steps.deal import deal
from benchmarks import interleave
from benchmarks.paper_arms import (
    MODELS,
    Corpus,
    Piece,
    Shape,
    build,
    mini_batches,
    offline,
    one_row,
    padded,
    targets,
)

RANKS = 8
PADDING, MINI_BATCH, REGROUPED, OFFLINE = (
    "padding",
    "MiniBatch + PosID",
    "MiniBatch, regrouped",
    "offline rows + PosID",
)
ARMS = (PADDING, MINI_BATCH, REGROUPED, OFFLINE)
TOLERANCE = 1e-5
"""Largest relative difference of losses that counts as rounding of float32."""
GOAL = 0.95
"""Least speed of regrouped steps over that of offline rows."""
Calls = list[list[dict[str, Any]]]
"""What every rank's model is called with in a step."""


def steps_of(
    arm: str, corpus: Corpus, shape: Shape, accumulation: int, cost: CostModel
) -> list[Calls]:
    """Return the calls of an arm: by step, by rank, one after the other."""
    collate = padded if arm == PADDING else one_row
    of_ranks: list[list[list[Piece]]]
    if arm == OFFLINE:
        rows = offline(corpus.lengths, Shape(1, shape.max_length, shape.seed))
        of_ranks = [[[row] for row in step] for step in _whole(rows, RANKS)]
        return [
            [[collate(corpus.train, row, shape) for row in rank] for rank in step]
            for step in of_ranks
        ]
    found = []
    for step in _whole(mini_batches(corpus.lengths, shape), RANKS * accumulation):
        if arm == REGROUPED:
            pieces = [piece for batch in step for piece in batch]
            homes = [number // (shape.batch_size * accumulation) for number in range(len(pieces))]
            dealt = deal([piece.length for piece in pieces], homes, RANKS, shape.max_length, cost)
            ranks = [[[pieces[number] for number in row] for row in rows if row] for rows in dealt]
        else:
            ranks = [step[rank * accumulation : (rank + 1) * accumulation] for rank in range(RANKS)]
        found.append([[collate(corpus.train, row, shape) for row in rank] for rank in ranks])
    return found


def _whole(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items) // size * size, size)]


class Trained:
    """A model that trains by the steps of one arm; `seconds` are those of all ranks of each
    step."""

    def __init__(self, arm: str, options: argparse.Namespace):
        import torch

        self.model = build(options, enabled=arm != PADDING)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.seconds: list[list[float]] = []
        self.losses: list[float] = []

    def step(self, calls: Calls) -> None:
        """Make an optimizer step of the ranks' calls."""
        import torch

        items = sum(targets(call) for rank in calls for call in rank)
        seconds, loss = [], 0.0
        for rank in calls:
            begun = time.perf_counter()
            for call in rank:
                found = self.model(**call, num_items_in_batch=items).loss
                found.backward()
                loss += found.item()
            seconds.append(time.perf_counter() - begun)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(seconds)
        self.losses.append(loss)


def measured(
    corpus: Corpus, accumulation: int, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return, arm by arm, tokens per second of eight ranks in step, and the loss of each step."""
    trained = {arm: Trained(arm, options) for arm in ARMS}
    cost = CostModel.for_model(trained[PADDING].model)
    steps = {arm: steps_of(arm, corpus, Shape.of(options), accumulation, cost) for arm in ARMS}
    for number in range(max(map(len, steps.values()))):
        for arm in ARMS:
            if number < len(steps[arm]):
                trained[arm].step(steps[arm][number])
        print(f"accumulation {accumulation}: step {number + 1}", flush=True)
    found = {}
    for arm, each in trained.items():
        calls = [call for step in steps[arm][options.warm :] for rank in step for call in rank]
        tokens = sum(
            int((call["attention_mask"] if arm == PADDING else call["input_ids"] * 0 + 1).sum())
            for call in calls
        )
        seconds = np.array(each.seconds[options.warm :])
        found[arm] = {
            "steps": len(steps[arm]),
            "tokens per second": tokens / float(seconds.max(1).sum()),
            "slowest over mean": float((seconds.max(1) / seconds.mean(1)).mean()),
            "losses": each.losses,
        }
    return found


def difference(found: dict[str, dict[str, Any]], arm: str) -> float:
    """Return the largest relative difference of an arm's losses from padding's."""
    wanted, losses = (np.array(found[name]["losses"]) for name in (PADDING, arm))
    return float((abs(losses - wanted) / wanted).max())


def checks(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield what has to hold, and whether it does."""
    for accumulation, found in result["found"].items():
        about = f"accumulation {accumulation}"
        most = difference(found, REGROUPED)
        steps = found[REGROUPED]["steps"]
        yield (
            most <= TOLERANCE,
            f"{about}: losses of {steps} steps are padding's within {TOLERANCE:.0e}: {most:.0e}",
        )
        share = found[REGROUPED]["tokens per second"] / found[OFFLINE]["tokens per second"]
        yield share >= GOAL, f"{about}: at least {GOAL} of the speed of offline rows: {share:.2f}"


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in words."""
    settings = result["settings"]
    yield (
        f"{RANKS} ranks, mini-batches of {settings['batch_size']}, rows of at most "
        f"{settings['max_length']} tokens, Llama {settings['model']}; steps after the first "
        f"{settings['warm']}"
    )
    for accumulation, found in result["found"].items():
        yield from (
            "",
            (
                "accumulation "
                f"{accumulation:<10}{'steps':>6}{'tokens/s':>10}{'x padding':>11}{'slowest':>9}"
            ),
        )
        base = found[PADDING]["tokens per second"]
        for arm, each in found.items():
            speed = each["tokens per second"]
            slowest = each["slowest over mean"]
            yield f"  {arm:<21}{each['steps']:>6}{speed:>10.0f}{speed / base:>11.2f}{slowest:>9.2f}"
    yield ""
    yield from (f"{'PASS' if passed else 'FAIL'}  {text}" for passed, text in result["checks"])


def main() -> None:
    """Train, measure and write; exit with 1 where losses are not padding's."""
    parser = interleave.parser(__doc__)
    parser.add_argument("--documents", type=int, default=768, help="to train on (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=4, help="documents of a mini-batch (%(default)s)"
    )
    parser.add_argument(
        "--max-length", type=int, default=4096, help="the most tokens of a document and of a row"
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="divide all lengths by this (%(default)s)"
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        nargs="+",
        default=[1, 4],
        help="mini-batches of a rank in a step",
    )
    parser.add_argument(
        "--warm", type=int, default=2, help="steps that are not timed, most of them checked"
    )
    parser.add_argument("--model", choices=list(MODELS), default="small")
    options = parser.parse_args()
    options.device, options.dtype = "cpu", "float32"
    where = interleave.begin(options)
    corpus = Corpus.of("flan", options)
    found = {str(each): measured(corpus, each, options) for each in options.accumulation}
    result = interleave.result_of("paper_ranks", options, where, found=found)
    result["checks"] = list(checks(result))
    print()
    interleave.write(options.json, result, lines(result))
    sys.exit(not all(passed for passed, text in result["checks"] if "losses" in text))


if __name__ == "__main__":
    main()
