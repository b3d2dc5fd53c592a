"""What enabling costs where nothing is packed, and what `enable` itself costs.

    python -m benchmarks.overhead --json benchmarks/results/overhead.json

Forward and backward of one and the same Llama on an unpacked batch of 4 x 256 tokens, called in
four ways. Arms:

* `stock`: autopack is imported and does nothing.
* `enabled`: `autopack.enable(model)`.
* `beside`: another model is enabled, so this one meets autopack's functions at transformers'
  places, inert. It shows how far from 1 two arms come out that run the same code but for a few
  `if`s.

Models are enabled and disabled, and called once on a few columns, outside the time that is taken;
the arms of a round follow each other at once. `enable()` is timed on models of few and of many
modules; it is to take at most 50 ms."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

from autopack.bench.race import Entrant
from benchmarks import interleave, workload

MODELS = {"small": (4, 128), "medium": (8, 512)}
"""Layers and hidden size."""
CALLS = ("plain", "attention_mask", "position_ids", "attention_mask position_ids")
"""What is given beside tokens and labels."""
ROWS, COLUMNS, VOCABULARY = 4, 256, 1024


def build(layers: int, hidden: int) -> Any:
    """Return a random Llama on sdpa."""
    return workload.llama(layers, hidden, hidden // 64, VOCABULARY)


def of_calls(options: argparse.Namespace, *, name: str, given: str) -> interleave.Race:
    """Return the race of a model that is called in one way."""
    import torch

    import autopack

    model = build(*MODELS[name])
    ids = torch.randint(
        VOCABULARY, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(options.seed)
    )
    positions = torch.arange(COLUMNS).expand(ROWS, COLUMNS).contiguous()
    more = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    call = {"input_ids": ids, "labels": ids} | {
        key: value for key, value in more.items() if key in given.split()
    }
    few = {name: tensor[:, :8].contiguous() for name, tensor in call.items()}
    states: dict[str, Any] = {"stock": nullcontext, "enabled": partial(autopack.enable, model)}
    states["beside"] = partial(autopack.enable, build(1, 64))
    gc.collect()
    gc.disable()  # a collection would fall to one arm or another
    arms = {
        arm: Entrant(workload.step(model, call), state, workload.step(model, few))
        for arm, state in states.items()
    }
    return interleave.Race(arms, "enabled", {"stock": 0.98})


def of_enable(options: argparse.Namespace, *, layers: int, verify: bool) -> interleave.Race:
    """Return a race of `enable` alone."""
    import autopack

    model = build(layers, 64)

    @contextmanager
    def taken_off() -> Iterator[None]:
        yield
        autopack.disable(model)

    return interleave.Race(
        {"enable": Entrant(partial(autopack.enable, model, verify=verify), taken_off)},
        "enable",
        warm=0,
    )


if __name__ == "__main__":
    races = {
        "enable(), 1 layer": partial(of_enable, layers=1, verify=False),
        "enable(), 24 layers": partial(of_enable, layers=24, verify=False),
        "enable(), verified": partial(of_enable, layers=1, verify=True),
    }
    races |= {
        f"{name}, {given}": partial(of_calls, name=name, given=given)
        for name, given in product(MODELS, CALLS)
    }
    interleave.main("overhead", __doc__, races, 60)
