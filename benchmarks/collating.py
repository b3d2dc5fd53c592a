"""Making a packed row of the examples of a mini-batch: `PackingCollator` against those of transformers and TRL.

    python -m benchmarks.collating                                       about half a minute
    python -m benchmarks.collating --rounds 3 --tokens 2048              a first look
    python -m benchmarks.collating --json benchmarks/results/collating.json

The arms, on the same examples:

* `autopack`: `PackingCollator()`.
* `transformers`: `DataCollatorWithFlattening()`.
* `trl`: `DataCollatorForLanguageModeling(padding_free=True)` of TRL's SFT trainer.

Before anything is timed, tokens, positions and labels must be equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks import interleave

LENGTHS = (16, 64, 256, 1024, 4096)
KINDS = ("list", "numpy", "tensor")
"""What the values of examples are: lists as datasets give them, arrays or tensors as their formats do."""
CALLS = 10
"""Calls of a collator per round."""
GOAL = 1.0


def examples(length: int, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Documents of one length with labels, as many as there are tokens for."""
    import numpy as np
    import torch

    draw = np.random.default_rng(options.seed)
    ids = [draw.integers(1, 30_000, size=length) for _ in range(max(2, options.tokens // length))]
    make: Any = {"list": lambda row: row.tolist(), "numpy": lambda row: row, "tensor": torch.from_numpy}[kind]
    return [{"input_ids": make(row), "labels": make(row.copy())} for row in ids]


def arms() -> dict[str, Any]:
    from transformers import DataCollatorWithFlattening
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from autopack import PackingCollator

    flattening, padding_free = (
        DataCollatorWithFlattening(),
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )
    return {"autopack": PackingCollator(), "transformers": flattening, "trl": padding_free}


def check(collators: dict[str, Any], batch: list[dict[str, Any]]) -> None:
    """Stop where the arms do not make the same row."""
    made = {name: collate([dict(example) for example in batch]) for name, collate in collators.items()}
    for name, found in made.items():
        for key in ("input_ids", "position_ids", "labels"):
            if not made["autopack"][key].equal(found[key]):
                raise SystemExit(f"{key} of {name} differ from autopack's")


def main() -> None:
    parser = interleave.parser(__doc__, rounds=11, threads=None)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a batch")
    options = parser.parse_args()
    where, collators = interleave.begin(options), arms()
    times: dict[str, dict[str, Any]] = {}
    for length, kind in product(LENGTHS, KINDS):
        batch = examples(length, kind, options)
        check(collators, batch)

        def run(collate: Any, batch: list[dict[str, Any]] = batch) -> Any:
            # TRL's takes values out of the examples.
            return lambda: [collate([dict(example) for example in batch]) for _ in range(CALLS)]

        runs = {name: run(collate) for name, collate in collators.items()}
        times[f"{length} {kind}"] = interleave.interleave(runs, options.rounds, report=None)
    result = interleave.result_of("collating", options, where, calls=CALLS, seconds=times)
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in a few lines."""
    settings = result["settings"]
    yield f"Batches of {settings['tokens']:,} tokens with labels; medians of {settings['rounds']} interleaved rounds"
    yield from ("", f"{'tokens of a document':<22}{'values':<8}{'autopack, ms':>14}{'transformers':>14}{'TRL':>8}")
    for name, found in result["seconds"].items():
        length, kind = name.split()
        others = {arm: 1 / of["median"] for arm, of in interleave.speeds(found, "autopack").items()}
        own = found["autopack"]["median"] * 1e3 / result["calls"]
        yield f"{length:<22}{kind:<8}{own:>14.2f}{others['transformers']:>14.2f}{others['trl']:>8.2f}"
    yield from ("", f"Times of the others are in units of autopack's. Goal: at least {GOAL}.")


if __name__ == "__main__":
    main()
