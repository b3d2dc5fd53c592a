"""Measure an optimizer step of transformers' Trainer: padded, enabled, and cut anew by
`max_tokens`.

    python -m benchmarks.steps --json benchmarks/results/steps.json

The settings are those that users have: a batch size, accumulation, and ranks (gloo, one thread
each). Documents have lengths like FLAN's. Every arm trains the same model on the same batches;
losses and gradient norms are compared before anything is said of speed. `enabled` is
`autopack.enable(trainer)`, `cut` is `autopack.enable(trainer, max_tokens=N)`. Time is that of
optimizer steps on the first rank in which no arm checked a call; `benchmarks.checks` measures what
checks cost. Memory is the most that torch hands out in the first three steps, with their checks and
the weights."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.race import kept_by, peak_memory, race
from autopack.bench.subjects import Lengths, draw
from autopack.commands import keep_freed_memory
from autopack.demo import pad
from benchmarks import interleave
from benchmarks.workload import llama

SETTINGS = {
    "2 ranks, batch 4, accumulation 4": (2, 4, 4, {"enabled": 1.25, "padded": 3.3}),
    "2 ranks, batch 4, accumulation 1": (2, 4, 1, {"enabled": 1.25, "padded": 2.6}),
    "1 process, batch 1, accumulation 8": (1, 1, 8, {"enabled": 1.1}),
}
"""Ranks, batch, accumulation, and how many times as fast as another arm `cut` is to be; on two
ranks in at most 0.7 of the memory of `padded`."""
ARMS = ("padded", "enabled", "cut")
TOLERANCE = 1e-5
VOCABULARY, COUNT = 4096, 2000


def _documents(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    lengths = draw(Lengths(options.mean, 0.93), COUNT, options.most, options.seed, shortest=8)
    tokens = np.random.default_rng(options.seed)
    return [{"input_ids": tokens.integers(5, VOCABULARY, length).tolist()} for length in lengths]


def _trained(arm: str, setting: str, options: argparse.Namespace, data: Any) -> dict[str, Any]:
    """Train a new model by one arm; return of each step the seconds, the checks in it, loss and
    norm.

    With `options.memory`, torch's profiler counts memory and slows the steps down.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import autopack

    _, batch, accumulation, _ = SETTINGS[setting]
    seconds: list[float] = []
    checks: list[int] = []

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.checks = checked()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.begun)
            # whether losses of documents add up
            is_tried = arm == "cut" and len(seconds).bit_count() == 1
            checks.append(checked() - self.checks + is_tried)

    def checked() -> int:
        return 0 if arm == "padded" else handle.models["model"].enabled.live.checked.checks

    model = llama(
        options.layers, options.hidden, options.heads, VOCABULARY, seed=options.seed, pad_token_id=0
    )
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=options.warm + options.steps,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=options.seed,
    )
    trainer = Trainer(model, args, data_collator=pad, train_dataset=data, callbacks=[Timed()])
    if arm != "padded":
        handle = autopack.enable(trainer, max_tokens=options.max_tokens if arm == "cut" else None)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        memory = (
            peak_memory(trainer.train, kept_by(model, None, {}), "cpu") if options.memory else 0
        )
        if not options.memory:
            trainer.train()
    logged = [
        (each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each
    ]
    slowest = trainer.training_step.__self__.slowest if arm == "cut" else 0.0
    return {
        "seconds": seconds,
        "checks": checks,
        "logged": logged,
        "slowest": slowest,
        "memory": memory,
    }


def _rank(
    rank: int,
    world: int,
    arms: tuple[str, ...],
    setting: str,
    options: argparse.Namespace,
    folder: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    keep_freed_memory()
    if world > 1:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 0,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
        )
    data = _documents(options)
    found = race(
        {arm: partial(_trained, arm, setting, options, data) for arm in arms}, options.rounds
    )
    torch.save(found, f"{folder}/{rank}")
    if world > 1:
        dist.barrier()
        # After a Trainer of stock transformers gloo's threads may end a process by a signal as
        # Python ends.
        os._exit(0)


def measured(
    arms: tuple[str, ...], setting: str, options: argparse.Namespace
) -> dict[str, list[Any]]:
    """Return what the first rank found, arm by arm, all in the same processes and by turns."""
    import torch

    world = SETTINGS[setting][0]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, args=(world, arms, setting, options, folder), nprocs=world
        )
        return torch.load(Path(folder, "0"))


@dataclass
class Setting:
    """A race of optimizer steps, whose arms run in processes of their own."""

    name: str
    options: argparse.Namespace

    def run(self, rounds: int) -> dict[str, Any]:
        """Race the arms, and measure the memory of each in other processes."""
        laps = measured(ARMS, self.name, self.options)
        wanted = np.array(laps["padded"][0]["logged"])
        apart = {
            arm: float((abs(np.array(laps[arm][0]["logged"]) - wanted) / abs(wanted)).max())
            for arm in ARMS
        }
        if not max(apart.values()) <= TOLERANCE:
            raise SystemExit(f"{self.name}: the arms do not train alike: {apart}")
        checks = np.array([lap["checks"] for of in laps.values() for lap in of]).sum(0)
        taken = (checks == 0) & (np.arange(len(checks)) >= self.options.warm)
        means = {
            arm: [float(np.mean(np.array(lap["seconds"])[taken])) for lap in of]
            for arm, of in laps.items()
        }
        times = {
            arm: interleave.summary([{"wall": each, "cpu": each} for each in of])
            for arm, of in means.items()
        }
        alone = argparse.Namespace(
            **{**vars(self.options), "rounds": 1, "warm": 0, "steps": 3, "memory": True}
        )
        peaks = {arm: measured((arm,), self.name, alone)[arm][0]["memory"] for arm in ARMS}
        found = {
            "seconds": times,
            "faster": interleave.faster(times, "cut"),
            "apart": apart,
            "peak bytes": peaks,
        }
        facts = {"steps": int(taken.sum()), "slowest rank over mean": laps["cut"][0]["slowest"]}
        return {"leads": "cut", "goals": SETTINGS[self.name][3], "facts": facts, **found}


if __name__ == "__main__":
    settings: dict[str, Any] = {name: partial(Setting, name) for name in SETTINGS}
    numbers = {"warm": 6, "steps": 6, "max_tokens": 2048, "mean": 300, "most": 2048}
    sizes = {"layers": 4, "hidden": 256, "heads": 4}
    interleave.main("steps", __doc__, settings, 3, memory=False, **numbers, **sizes)
