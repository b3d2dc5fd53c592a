"""Pairs on two processes (gloo, CPU), for test_equal_pairs.py: what a trainer logs, and what its plan says of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trl
from torch.utils.data import DataLoader

import autopack
from autopack import tiny
from tests.integration import processes
from tests.packing.preference import dpo, losses_alone, moved, pairs

WORLD = 2
ACCUMULATED = 2
EPOCHS = 2
CAPACITY = 150


class PackedDPOTrainer(trl.DPOTrainer):
    """The trainer of docs/packing.md."""

    def get_train_dataloader(self) -> Any:
        lengths = autopack.packing.pair_lengths(self.train_dataset, self.data_collator)
        sampler = autopack.PackedBatchSampler(lengths, CAPACITY, seed=self.args.seed)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


def run(directory: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return processes.run(_rank, directory, WORLD)


def _rank(rank: int, directory: Path) -> dict[str, Any]:
    options = {"gradient_accumulation_steps": ACCUMULATED, "num_train_epochs": EPOCHS, "learning_rate": 0.0}
    found: dict[str, Any] = {}
    for name in ("weighed", "stock"):
        folder = Path(directory, name)
        trainer = dpo(folder, "llama", PackedDPOTrainer, train_dataset=pairs(30), disable_tqdm=True, **options)
        if name == "weighed":
            autopack.enable(trainer)
            autopack.packing.weigh_pairs(trainer)
        trainer.train()
        found[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    lengths = autopack.packing.pair_lengths(trainer.train_dataset, trainer.data_collator)
    alone = losses_alone(moved(tiny.build("llama")), tiny.build("llama"), trainer.train_dataset)["sigmoid"]
    found["alone"], found["sizes"] = [], []
    of_ranks = [
        autopack.PackedBatchSampler(lengths, CAPACITY, seed=42, num_replicas=WORLD, rank=r) for r in range(WORLD)
    ]
    for epoch in range(EPOCHS):
        for sampler in of_ranks:
            sampler.set_epoch(epoch)
        steps = list(zip(*of_ranks, strict=True))
        for first in range(0, len(steps), ACCUMULATED):
            batches = [batch for step in steps[first : first + ACCUMULATED] for batch in step]
            found["sizes"].append([len(batch) for batch in batches])
            found["alone"].append(float(alone[[index for batch in batches for index in batch]].mean()))
    return found
