"""Pairs on several processes (gloo, CPU), for test_equal_pairs.py: what trainers log, and what plans say of it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
import trl
from torch.utils.data import DataLoader

import autopack
from autopack import tiny
from tests.integration import processes
from tests.packing.preference import dpo, losses_alone, moved, pairs

ACCUMULATED = 2
EPOCHS = 2
CAPACITY = 120
PAIRS = 31


class PackedDPOTrainer(trl.DPOTrainer):
    """The trainer of docs/packing.md."""

    def get_train_dataloader(self) -> Any:
        lengths = autopack.packing.pair_lengths(self.train_dataset, self.data_collator)
        sampler = autopack.PackedBatchSampler(lengths, CAPACITY, seed=self.args.seed)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class OneProcess(trl.DPOTrainer):
    """Has the batches of all ranks in turn."""

    world: int

    def get_train_dataloader(self) -> Any:
        lengths = autopack.packing.pair_lengths(self.train_dataset, self.data_collator)
        batches = [*chain.from_iterable(zip(*_samplers(lengths, self.world), strict=True))]
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def run(directory: Path, world: int) -> list[dict[str, Any]]:
    """What each rank found, and the first what one process did with `world` times the accumulation."""
    for name in ("all", "one"):
        directory.joinpath(name).mkdir()
    directory.joinpath("one", "world").write_text(str(world))
    found = processes.run(_rank, directory / "all", world)
    found[0]["one"] = processes.run(_one, directory / "one", 1)[0]
    return found


def _rank(rank: int, directory: Path) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    options = {"gradient_accumulation_steps": ACCUMULATED}
    still = _trained(directory, PackedDPOTrainer, num_train_epochs=EPOCHS, learning_rate=0.0, **options)
    found: dict[str, Any] = {"weighed": _logged(still, "loss")}
    found["moved"] = _results(_trained(directory, PackedDPOTrainer, num_train_epochs=1, **options))
    lengths = autopack.packing.pair_lengths(still.train_dataset, still.data_collator)
    alone = losses_alone(moved(tiny.build("llama")), tiny.build("llama"), still.train_dataset)["sigmoid"]
    found |= {"alone": [], "sizes": [], "means of means": []}
    of_ranks = _samplers(lengths, world)
    for epoch in range(EPOCHS):
        for sampler in of_ranks:
            sampler.set_epoch(epoch)
        steps = list(zip(*of_ranks, strict=True))
        found["sizes"] += [[len(batch) for batch in step] for step in steps]
        for first in range(0, len(steps), ACCUMULATED):
            batches = [batch for step in steps[first : first + ACCUMULATED] for batch in step]
            found["alone"].append(float(alone[[index for batch in batches for index in batch]].mean()))
            found["means of means"].append(sum(float(alone[batch].mean()) for batch in batches) / len(batches))
    return found


def _one(_: int, directory: Path) -> dict[str, Any]:
    OneProcess.world = int(directory.joinpath("world").read_text())
    return _results(
        _trained(directory, OneProcess, num_train_epochs=1, gradient_accumulation_steps=ACCUMULATED * OneProcess.world)
    )


def _samplers(lengths: Any, world: int) -> list[autopack.PackedBatchSampler]:
    return [autopack.PackedBatchSampler(lengths, CAPACITY, seed=42, num_replicas=world, rank=r) for r in range(world)]


def _trained(directory: Path, kind: Any, **options: Any) -> Any:
    given = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", **options}
    trainer = dpo(directory / "trained", "llama", kind, train_dataset=pairs(PAIRS), **given)
    autopack.enable(trainer)
    autopack.packing.weigh_pairs(trainer)
    trainer.train()
    return trainer


def _results(trainer: Any) -> dict[str, Any]:
    parameters = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    parameters = {name: value.clone() for name, value in parameters.items()}
    return {"losses": _logged(trainer, "loss"), "parameters": parameters}


def _logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
