"""A trainer on two processes that stops in its second epoch and goes on: what its processes see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import autopack
from autopack import tiny
from tests.integration import processes

WORLD = 2
DOCUMENTS = 203
CAPACITY = 60
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
QUIET |= {"remove_unused_columns": False, "logging_strategy": "no"}


class Documents(Dataset):  # type: ignore[type-arg]
    """Random documents, by number."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.tokens = [draw.integers(3, 90, size=int(n)) for n in draw.integers(3, 25, size=DOCUMENTS)]
        self.lengths = [len(tokens) for tokens in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "number": [index] * self.lengths[index]}


class Streams(Trainer):
    """Notes which documents it sees."""

    seen: list[list[int]]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        self.seen.append(sorted(set(inputs.pop("number").flatten().tolist())))
        return super().training_step(model, inputs, *args)


class PackedTrainer(Streams):
    """The trainer of docs/packing.md."""

    def get_train_dataloader(self) -> Any:
        sampler = autopack.PackedBatchSampler(self.train_dataset.lengths, CAPACITY)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class _Stops(TrainerCallback):
    def __init__(self, at: int):
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self.at


def run(directory: Path) -> list[dict[str, Any]]:
    """For each rank what it saw in a whole run and in one that was resumed, and the parameters at the end."""
    return processes.run(_rank, directory, WORLD)


def _train(directory: str, stops: int | None = None, resume: str | None = None) -> tuple[Any, Any]:
    model = tiny.build("llama", attn_implementation="sdpa").train()
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        **QUIET,
    )
    trainer = PackedTrainer(model, arguments, train_dataset=Documents(), data_collator=autopack.PackingCollator())
    trainer.seen = []
    if stops is not None:
        trainer.add_callback(_Stops(stops))
    with autopack.enable(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])


def _stream(directory: str, endless: bool = False, stops: int | None = None, resume: str | None = None) -> Any:
    """A stream whose processes get unequally many rows of each epoch.

    An endless one begins again where it ends, in another order.
    """
    documents = Documents()
    examples = [{**documents[i], "input_ids": documents.tokens[i].tolist()} for i in range(103)]
    stream = datasets.Dataset.from_list(examples).to_iterable_dataset(num_shards=4)
    if endless:
        stream = stream.repeat(None).shuffle(seed=0, buffer_size=20)
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=40,
        per_device_train_batch_size=1,
        accelerator_config={"dispatch_batches": False},
        **QUIET,
    )
    model = tiny.build("llama", attn_implementation="sdpa").train()
    rows = autopack.pack(stream, CAPACITY, buffer_size=16)
    trainer = Streams(model, arguments, train_dataset=rows, data_collator=autopack.PackingCollator())
    trainer.seen = []
    if stops is not None:
        trainer.add_callback(_Stops(stops))
    with autopack.enable(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return {"steps": len(trainer.seen), "epoch": trainer.state.epoch, "seen": trainer.seen}


def _rank(rank: int, directory: Path) -> dict[str, Any]:
    whole, expected = _train(f"{directory}/whole")
    steps = whole.state.max_steps
    at = steps // 2 + steps // 4  # half of the second epoch
    first, _ = _train(f"{directory}/stopped", stops=at)
    second, found = _train(f"{directory}/stopped", resume=f"{directory}/stopped/checkpoint-{at}")
    result = {"whole": whole.seen, "first": first.seen, "second": second.seen}
    result["stream"] = _stream(f"{directory}/stream")
    if hasattr(datasets.IterableDataset, "repeat"):
        endless = f"{directory}/endless"
        resume = f"{endless}/checkpoint-27"
        runs = _stream(endless, True), _stream(endless, True, 27), _stream(endless, True, resume=resume)
        result["endless"] = [run["seen"] for run in runs]
    return {**result, "error": float((found - expected).abs().max())}
