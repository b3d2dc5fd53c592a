"""Soak autopack: thousands of training steps on random layouts, packed and enabled, against the
padded run of stock.

    python -m compat.soak                          2,000 steps of every model, and 1,000 rounds of enable and disable
    python -m compat.soak --steps 200 --only llama
    python -m compat.soak --json FILE              also write the numbers there (compat/results/soak.json is recorded)

Three copies of a model are trained by SGD on the same documents: enabled, in packed rows; stock, in
padded batches; and stock again, the documents of each batch in reverse order. What lies between the
last two is rounding and nothing else, carried on through all steps: their distance is the
yardstick, and the first two may be `FACTOR` times as far apart. Memory is counted after a tenth of
the steps and at the end. The exit status is 1 where a bound is broken."""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import autopack
from autopack import tiny
from autopack.layout import IGNORED_LABEL
from compat.common import packages, quietly, write_json

KINDS = {
    "llama": ("llama", "causal-lm"),
    "mixture": ("mixtral", "causal-lm"),
    "recurrent": ("mamba2", "causal-lm"),
    "classification": ("bert", "sequence-classification"),
}
"""A model type and task by what it stands for."""
FACTOR = 10.0
"""Packed rows round at other places than padded ones do, not only in another order; leaks are a
thousand times this."""
FLOOR = 1e-6
"""The least distance that counts: some roundings of float32, relative to how far training has moved
the weights."""
OBJECTS, BYTES = 200, 32 << 20
"""What may be there more at the end, in objects that the collector knows and in resident memory:
caches that fill."""
RATE = 0.05
LONGEST, MOST = 24, 6
"""The most tokens of a document, and the most documents of a batch."""


@dataclass(frozen=True)
class Batch:
    """The documents of one step, with the label of each where they are classified."""

    documents: list[torch.Tensor]
    labels: torch.Tensor | None
    declared: str
    """How the packed row declares them."""

    def packed(self) -> dict[str, Any]:
        """One row of all documents, end to end."""
        lengths = [len(document) for document in self.documents]
        ids = torch.cat(self.documents)[None]
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        where = torch.cat([torch.arange(length) for length in lengths])[None]
        told: dict[str, Any] = {
            "positions": {"position_ids": where},
            "positions and mask": {"position_ids": where, "attention_mask": torch.ones_like(ids)},
            "segments": {"attention_mask": number + 1},
            "numbers": {"seq_idx": number},
        }[self.declared]
        return {"input_ids": ids, "labels": ids if self.labels is None else self.labels, **told}

    def padded(self, backwards: bool = False) -> dict[str, torch.Tensor]:
        """One row for each document, in their order or in the reverse."""
        order = range(len(self.documents))[:: -1 if backwards else 1]
        documents = [self.documents[number] for number in order]
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(d) for d in documents], batch_first=True
        )
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        labels = (
            ids.masked_fill(mask == 0, IGNORED_LABEL)
            if self.labels is None
            else self.labels[list(order)]
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(model: PreTrainedModel, classifies: bool, seed: int) -> Iterator[Batch]:
    """Random documents without end, the same for the same seed."""
    drawn = random.Random(seed)
    declared = ("positions", "positions and mask", "segments", "numbers")
    while True:
        lengths = [drawn.randint(1, LONGEST) for _ in range(drawn.randint(2, MOST))]
        lengths[drawn.randrange(len(lengths))] += 1  # somebody predicts something
        ids = tiny.tokens(model.config, 1, sum(lengths), seed=drawn.getrandbits(30))[0]
        labels = (
            torch.tensor([drawn.randrange(model.config.num_labels or 1) for _ in lengths])
            if classifies
            else None
        )
        yield Batch(list(ids.split(lengths)), labels, drawn.choice(declared))


@dataclass
class Result:
    """What came out of one model."""

    model_type: str
    task: str
    rounds: int
    """Rounds of enable and disable."""
    distance: float = 0.0
    """Between the weights of the packed and the padded run at the end, relative to how far these
    have moved."""
    yardstick: float = FLOOR
    """The same between the two padded runs."""
    worst_ratio: float = 0.0
    """The largest of distance over yardstick at any of the hundred times that they were
    measured."""
    objects: tuple[int, int] = (0, 0)
    """Objects that the collector knows, after a tenth of the steps, and how many more at the
    end."""
    mebibytes: tuple[int, int] = (0, 0)
    """The same of resident memory."""
    objects_by_rounds: int = 0
    """Objects more after all of them than after a tenth."""

    @property
    def wrong(self) -> list[str]:
        """The bounds that are broken."""
        found = []
        if not self.worst_ratio <= FACTOR:
            found.append(
                f"packed is {self.worst_ratio:.1f} yardsticks from padded, wanted at most "
                f"{FACTOR:.0f}"
            )
        if self.objects[1] > OBJECTS or self.objects_by_rounds > OBJECTS:
            found.append(
                f"{max(self.objects[1], self.objects_by_rounds)} objects more, wanted at most "
                f"{OBJECTS}"
            )
        if self.mebibytes[1] > BYTES >> 20:
            found.append(f"{self.mebibytes[1]} MiB more, wanted at most {BYTES >> 20}")
        return found


def soak(
    kind: str, steps: int, rounds: int, seed: int, enabled: bool = True, progress: bool = False
) -> Result:
    """Train the three copies of a model of a kind of `KINDS`.

    With `enabled=False` the packed one is stock too, which leaks: the control.
    """
    model_type, task = KINDS[kind]
    stock = tiny.build(model_type, task=task, seed=seed).train()
    for module in stock.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # draws other numbers for other shapes
    packed, padded, reordered = copy.deepcopy(stock), copy.deepcopy(stock), stock
    start = [parameter.detach().clone() for parameter in stock.parameters()]
    runs = [
        (model, torch.optim.SGD(model.parameters(), RATE)) for model in (packed, padded, reordered)
    ]
    handle = autopack.enable(packed) if enabled else None
    result = Result(model_type, task, rounds)
    before = _memory()
    source = batches(stock, task == "sequence-classification", seed)
    for step in tqdm(range(steps), desc=kind, disable=not progress, file=sys.stderr):
        batch = next(source)
        calls = (batch.packed(), batch.padded(), batch.padded(backwards=True))
        for (model, optimizer), call in zip(runs, calls, strict=True):
            _train(model, optimizer, call)
        if (step + 1) % max(1, steps // 100) == 0:
            moved = _apart(padded, start)
            result.distance = _apart(packed, list(padded.parameters())) / moved
            result.yardstick = max(
                result.yardstick, _apart(reordered, list(padded.parameters())) / moved
            )
            result.worst_ratio = max(result.worst_ratio, result.distance / result.yardstick)
        if step + 1 == max(1, steps // 10):
            before = _memory()
    del runs, source
    after = _memory()
    result.objects = before[0], after[0] - before[0]
    result.mebibytes = before[1] >> 20, (after[1] - before[1]) >> 20
    if handle is not None:
        handle.remove()
    result.objects_by_rounds = _of_rounds(packed, rounds)
    return result


def _train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]
) -> None:
    model(**arguments).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _of_rounds(model: PreTrainedModel, rounds: int) -> int:
    before = _memory()
    for number in range(rounds):
        autopack.enable(model)
        autopack.disable(model)
        if number + 1 == max(1, rounds // 10):
            before = _memory()
    return _memory()[0] - before[0]


@torch.no_grad()
def _apart(model: PreTrainedModel, others: list[torch.Tensor]) -> float:
    pairs = zip(model.parameters(), others, strict=True)
    return float(sum((one - other).double().square().sum() for one, other in pairs)) ** 0.5


def _memory() -> tuple[int, int]:
    """How many objects the collector knows, and the bytes of resident memory (0 where there is no
    /proc)."""
    gc.collect()
    pages = Path("/proc/self/statm")
    resident = int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0
    return len(gc.get_objects()), resident


def main(arguments: list[str] | None = None) -> int:
    """Soak the models that are asked for; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help="optimizer steps of each model (default: 2000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1000, help="rounds of enable and disable (default: 1000)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), help="some of the models"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or asked.rounds < 1:
        parser.error("wanted at least one step and one round")
    results = {}
    with quietly():
        for kind in asked.only:
            results[kind] = soak(
                kind, asked.steps, asked.rounds, asked.seed, progress=sys.stderr.isatty()
            )
            print(kind, asdict(results[kind]), "; ".join(results[kind].wrong) or "held", flush=True)
    if asked.json is not None:
        found = {
            "with": packages(),
            "steps": asked.steps,
            "seed": asked.seed,
            "bounds": {"factor": FACTOR, "objects": OBJECTS, "mebibytes": BYTES >> 20},
            "models": {
                kind: {**asdict(result), "wrong": result.wrong} for kind, result in results.items()
            },
        }
        write_json(asked.json, found)
    return int(any(result.wrong for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
