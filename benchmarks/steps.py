"""Measure an optimizer step of transformers' Trainer: padded, enabled, and cut anew by `max_tokens`.

    python -m benchmarks.steps --json benchmarks/results/steps.json

The settings are those that users have: a batch size, accumulation, and ranks (gloo, one thread each). Documents have
lengths like FLAN's. Every arm trains the same model on the same batches; losses and gradient norms are compared before
anything is said of speed. `enabled` is `autopack.enable(trainer)`, `cut` is `autopack.enable(trainer, max_tokens=N)`.
Time is that of optimizer steps on the first rank in which no arm checked a call; `benchmarks.checks` measures what
checks cost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.race import kept_by, peak_memory
from autopack.commands import keep_freed_memory
from benchmarks import interleave
from benchmarks.workload import llama

SETTINGS = {
    "2 ranks, batch 4, accumulation 4": (2, 4, 4, {"enabled": 1.25, "padded": 3.3}),
    "2 ranks, batch 4, accumulation 1": (2, 4, 1, {"enabled": 1.25, "padded": 2.6}),
    "1 process, batch 1, accumulation 8": (1, 1, 8, {"enabled": 1.1}),
}
"""Ranks, batch, accumulation, and how many times as fast as another arm `cut` is to be."""
ARMS = ("padded", "enabled", "cut")
MEMORY = 0.7
"""Goal: peak memory of a rank of `cut` over that of `padded`, by torch's allocations."""
TOLERANCE = 1e-5
_COUNT = 2000


def documents(seed: int, mean: float, spread: float, most: int) -> list[dict[str, list[int]]]:
    """Return documents of lognormal lengths with this mean and deviation."""
    draw = np.random.default_rng(seed)
    sigma = np.sqrt(np.log(1 + (spread / mean) ** 2))
    lengths = np.clip(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, _COUNT), 8, most).astype(int)
    return [{"input_ids": draw.integers(5, 4096, length).tolist()} for length in lengths]


def _padded(examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    rows = [each["input_ids"] for each in examples]
    longest = max(map(len, rows))

    def filled(fill: int, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor([value + [fill] * (longest - len(value)) for value in values])

    mask = filled(0, [[1] * len(row) for row in rows])
    return {"input_ids": filled(0, rows), "labels": filled(-100, rows), "attention_mask": mask}


def _trained(arm: str, setting: str, options: argparse.Namespace, data: Any) -> dict[str, Any]:
    """Train a new model by one arm; return of each step the seconds, the checks in it, loss and norm.

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
            is_tried = arm == "cut" and len(seconds).bit_count() == 1  # whether losses of documents add up
            checks.append(checked() - self.checks + is_tried)

    def checked() -> int:
        return 0 if arm == "padded" else handle.models["model"].enabled.live.checked.checks

    model = llama(options.layers, options.hidden, options.heads, 4096, seed=options.seed, pad_token_id=0)
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
    trainer = Trainer(model, args, data_collator=_padded, train_dataset=data, callbacks=[Timed()])
    if arm != "padded":
        handle = autopack.enable(trainer, max_tokens=options.max_tokens if arm == "cut" else None)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        memory = peak_memory(trainer.train, kept_by(model, None, {}), "cpu") if options.memory else 0
        if not options.memory:
            trainer.train()
    logged = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    slowest = trainer.training_step.__self__.slowest if arm == "cut" else 0.0
    return {"seconds": seconds, "checks": checks, "logged": logged, "slowest": slowest, "memory": memory}


def _rank(rank: int, world: int, arms: tuple[str, ...], setting: str, options: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    keep_freed_memory()
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    data = documents(options.seed, options.mean, options.spread, options.most)
    found: dict[str, list[Any]] = {arm: [] for arm in arms}
    for number in range(options.rounds):
        first = number % len(arms)
        for arm in arms[first:] + arms[:first]:
            found[arm].append(_trained(arm, setting, options, data))
    torch.save(found, f"{folder}/{rank}")
    if world > 1:
        dist.barrier()
        # After a Trainer of stock transformers gloo's threads may end a process by a signal as Python ends.
        os._exit(0)


def measured(arms: tuple[str, ...], setting: str, options: argparse.Namespace) -> dict[str, list[Any]]:
    """Return what the first rank found, arm by arm, all in the same processes and by turns."""
    import torch

    world = SETTINGS[setting][0]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(world, arms, setting, options, folder), nprocs=world)
        return torch.load(Path(folder, "0"))


def of_setting(setting: str, options: argparse.Namespace) -> dict[str, Any]:
    """Race the arms, and measure the memory of each in processes of its own."""
    laps = measured(ARMS, setting, options)
    wanted = np.array(laps["padded"][0]["logged"])
    apart = {arm: float((abs(np.array(laps[arm][0]["logged"]) - wanted) / abs(wanted)).max()) for arm in ARMS}
    if max(apart.values()) > TOLERANCE:
        raise SystemExit(f"{setting}: the arms do not train alike: {apart}")
    checks = np.array([lap["checks"] for of in laps.values() for lap in of]).sum(0)
    taken = (checks == 0) & (np.arange(len(checks)) >= options.warm)
    alone = argparse.Namespace(**{**vars(options), "rounds": 1, "warm": 0, "steps": 3, "memory": True})
    return {
        "setting": setting,
        "steps": int(taken.sum()),
        "seconds": {arm: [float(np.mean(np.array(lap["seconds"])[taken])) for lap in laps[arm]] for arm in ARMS},
        "difference": apart,
        "slowest": laps["cut"][0]["slowest"],
        "memory": {arm: measured((arm,), setting, alone)[arm][0]["memory"] for arm in ARMS},
    }


def lines(found: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """Return the result in words."""
    text = [
        f"Lengths of mean {options.mean:.0f} and deviation {options.spread:.0f}, at most {options.most}; max_tokens="
        f"{options.max_tokens}; means of steps after {options.warm}, medians of {options.rounds} rounds",
        "",
        f"{'':36}{'s a step':>10}{'x padded':>10}{'x enabled':>11}{'memory':>9}{'loss, norm':>12}{'slowest rank':>14}",
    ]
    for each in found:
        seconds = {arm: statistics.median(of) for arm, of in each["seconds"].items()}
        text.append(f"{each['setting']} ({each['steps']} steps)")
        for arm in ARMS:
            beside = [
                statistics.median(a / b for a, b in zip(each["seconds"][other], each["seconds"][arm], strict=True))
                for other in ("padded", "enabled")
            ]
            memory = each["memory"][arm] / each["memory"]["padded"]
            slowest = f"{each['slowest']:14.3f}" if arm == "cut" else ""
            text.append(
                f"  {arm:34}{seconds[arm]:10.2f}{beside[0]:10.2f}{beside[1]:11.2f}{memory:9.2f}"
                f"{each['difference'][arm]:12.0e}{slowest}"
            )
    goals = [f"{s}: " + ", ".join(f"{x} x {arm}" for arm, x in SETTINGS[s][3].items()) for s in SETTINGS]
    text += ["", *(f"Goal of {goal}" for goal in goals), f"Goal: at most {MEMORY} x the memory of padded on 2 ranks."]
    text += ["Memory is the most that torch hands out in the first three steps, with their checks and the weights."]
    return text


def main() -> None:
    parser = interleave.parser(__doc__, rounds=3, threads=None)
    numbers = {"warm": 6, "steps": 6, "max_tokens": 2048, "mean": 300, "spread": 350, "most": 2048}
    for name, value in {**numbers, "layers": 4, "hidden": 256, "heads": 4}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="(%(default)s)")
    parser.set_defaults(memory=False)
    options = parser.parse_args()
    where = interleave.begin(options)
    found = [of_setting(setting, options) for setting in SETTINGS]
    result = interleave.result_of("steps", options, where, found=found)
    interleave.write(options.json, result, lines(found, options))


if __name__ == "__main__":
    main()
