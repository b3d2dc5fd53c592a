"""Soak autopack: thousands of training steps on random layouts, packed and enabled, against the
padded run of stock.

    python -m compat.soak --record                 2,000 steps of every model, and 1,000 rounds of enable and disable
    python -m compat.soak llama --steps 200

Three copies of a model are trained by SGD on the same documents: enabled, in packed rows; stock, in
padded batches; and stock again, the documents of each batch in reverse order. What lies between the
last two is rounding and nothing else, carried on through all steps: their distance is the
yardstick, and the first two may be `FACTOR` times as far apart. Memory is counted after a tenth of
the steps and at the end."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import autopack
from autopack import tiny
from autopack.layout import IGNORED_LABEL
from compat import study
from compat.study import Study
from tests.engine import counted, numbered, padded_batch

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
OBJECTS, MEBIBYTES = 200, 32
"""What may be there more at the end, in objects that the collector knows and in resident memory:
caches that fill."""
RATE = 0.05
LONGEST, MOST = 24, 6
"""The most tokens of a document, and the most documents of a batch."""


def calls(model: PreTrainedModel, classifies: bool, drawn: random.Random) -> list[dict[str, Any]]:
    """Random documents as one packed row, as a padded batch, and as one in the reverse order."""
    lengths = [drawn.randint(1, LONGEST) for _ in range(drawn.randint(2, MOST))]
    lengths[drawn.randrange(len(lengths))] += 1  # somebody predicts something
    ids = tiny.tokens(model.config, 1, sum(lengths), seed=drawn.getrandbits(30))
    classes = [drawn.randrange(model.config.num_labels or 1) for _ in lengths]
    number, where = numbered(lengths), counted(lengths)
    declared: dict[str, Any] = drawn.choice([
        {"position_ids": where},
        {"position_ids": where, "attention_mask": torch.ones_like(ids)},
        {"attention_mask": number},
        {"seq_idx": number},
    ])  # fmt: skip
    found = [{"input_ids": ids, "labels": torch.tensor(classes) if classifies else ids, **declared}]
    for step in (1, -1):
        padded = padded_batch(ids[0].split(lengths)[::step])
        of_tokens = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, IGNORED_LABEL)
        found.append(
            {**padded, "labels": torch.tensor(classes[::step]) if classifies else of_tokens}
        )
    return found


def soak(kind: str, steps: int, rounds: int, seed: int, enabled: bool = True) -> dict[str, Any]:
    """Train the three copies of a model of a kind of `KINDS`.

    Weights of the packed and the padded run are at a `distance`, relative to how far these have
    moved; `yardstick` is that of the two padded runs. With `enabled=False` the packed one is stock
    too, which leaks: the control."""
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
    before, drawn = _memory(), random.Random(seed)
    distance, yardstick, worst = 0.0, FLOOR, 0.0
    for step in range(1, steps + 1):
        batch = calls(stock, task == "sequence-classification", drawn)
        for (model, optimizer), call in zip(runs, batch, strict=True):
            model(**call).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 100) == 0:
            moved, others = _apart(padded, start), list(padded.parameters())
            distance = _apart(packed, others) / moved
            yardstick = max(yardstick, _apart(reordered, others) / moved)
            worst = max(worst, distance / yardstick)
        if step == max(1, steps // 10):
            before = _memory()
    del runs
    more = [now - then for now, then in zip(_memory(), before, strict=True)]
    if handle is not None:
        handle.remove()
    by_rounds = _of_rounds(packed, rounds)
    bounds = {"yardsticks from padded": (worst, FACTOR), "MiB more": (more[1], MEBIBYTES)}
    bounds["objects more"] = (max(more[0], by_rounds), OBJECTS)
    wrong = [
        f"{found:.1f} {what}, wanted at most {most}"
        for what, (found, most) in bounds.items()
        if not found <= most
    ]
    return {
        "status": "WRONG" if wrong else "held",
        "steps": steps,
        "model_type": model_type,
        "task": task,
        "distance": distance,
        "yardstick": yardstick,
        "worst_ratio": worst,
        "objects": more[0],
        "mebibytes": more[1],
        "rounds": rounds,
        "objects_by_rounds": by_rounds,
        "wrong": wrong,
    }


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
    """How many objects the collector knows, and MiB of resident memory (0 where there is no
    /proc)."""
    gc.collect()
    pages = Path("/proc/self/statm")
    resident = int(pages.read_text().split()[1]) >> 8 if pages.exists() else 0
    return len(gc.get_objects()), resident


STUDY = Study(
    "soak",
    str(__doc__),
    lambda: KINDS,
    lambda names, asked: ((name, soak(name, asked.steps, asked.rounds, 0)) for name in names),
    options={
        "steps": {
            "type": int,
            "default": 2000,
            "help": "of the optimizer, each model (%(default)s)",
        },
        "rounds": {"type": int, "default": 1000, "help": "of enable and disable (%(default)s)"},
    },
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
