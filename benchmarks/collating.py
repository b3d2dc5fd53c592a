"""Making a packed row of the examples of a mini-batch: `PackingCollator` against those of
transformers and TRL.

    python -m benchmarks.collating --json benchmarks/results/collating.json      about half a minute

Races are of documents of one length whose values are lists as datasets give them, arrays or
tensors. The arms:

* `autopack`: `PackingCollator()`.
* `transformers`: `DataCollatorWithFlattening()`.
* `trl`: `DataCollatorForLanguageModeling(padding_free=True)` of TRL's SFT trainer.

Before anything is timed, tokens, positions and labels must be equal.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from typing import Any

from benchmarks import interleave

LENGTHS = (16, 64, 256, 1024, 4096)
KINDS = ("list", "numpy", "tensor")
CALLS = 10
"""Calls of a collator per round."""


def examples(length: int, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return documents of one length with labels, as many as there are tokens for."""
    import numpy as np
    import torch

    draw = np.random.default_rng(options.seed)
    ids = [draw.integers(1, 30_000, size=length) for _ in range(max(2, options.tokens // length))]
    make: Any = {
        "list": lambda row: row.tolist(),
        "numpy": lambda row: row,
        "tensor": torch.from_numpy,
    }[kind]
    return [{"input_ids": make(row), "labels": make(row.copy())} for row in ids]


def race_of(options: argparse.Namespace, *, length: int, kind: str) -> interleave.Race:
    """Return the race on one kind of documents."""
    from transformers import DataCollatorWithFlattening
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from autopack import PackingCollator

    batch = examples(length, kind, options)
    collators: dict[str, Any] = {
        "autopack": PackingCollator(),
        "transformers": DataCollatorWithFlattening(),
        "trl": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    }

    def run(collate: Any) -> Any:
        for _ in range(CALLS):
            # TRL's takes values out of the examples
            made = collate([dict(example) for example in batch])
        return [made[name] for name in ("input_ids", "position_ids", "labels")]

    arms = {name: partial(run, collate) for name, collate in collators.items()}
    return interleave.Race(arms, "autopack", {"transformers": 1.0, "trl": 1.0}, tolerance=0.0)


if __name__ == "__main__":
    pairs = product(LENGTHS, KINDS)
    races = {
        f"{length} {kind}": partial(race_of, length=length, kind=kind) for length, kind in pairs
    }
    interleave.main("collating", __doc__, races, 11, tokens=16_384)
