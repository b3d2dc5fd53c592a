"""A trainer on two processes that stops in its second epoch and goes on: what its processes see."""

from __future__ import annotations

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
QUIET = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
QUIET |= {"remove_unused_columns": False, "logging_strategy": "no"}


class Documents(Dataset):
    """Random documents, by number."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.tokens = [draw.integers(3, 90, size=int(n)) for n in draw.integers(3, 25, size=DOCUMENTS)]
        self.lengths = [len(tokens) for tokens in self.tokens]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "number": [index] * self.lengths[index]}


class Streams(Trainer):
    """Notes which documents it sees."""

    seen: list[list[int]]

    def training_step(self, model, inputs, *args):
        self.seen.append(sorted(set(inputs.pop("number").flatten().tolist())))
        return super().training_step(model, inputs, *args)


class PackedTrainer(Streams):
    """The trainer of docs/packing.md."""

    def get_train_dataloader(self):
        sampler = autopack.PackedBatchSampler(self.train_dataset.lengths, CAPACITY)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


class _Stops(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_save = state.global_step == self.at


def run(directory):
    """For each rank what it saw in a whole run and in one that was resumed, and the parameters at the end."""
    return processes.run(_rank, directory, WORLD)


def _run(kind, rows, arguments, stops, resume):
    model = tiny.build("llama", attn_implementation="sdpa").train()
    trainer = kind(model, arguments, train_dataset=rows, data_collator=autopack.PackingCollator())
    trainer.seen = []
    if stops is not None:
        trainer.add_callback(_Stops(stops))
    with autopack.enable(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _train(directory, stops=None, resume=None):
    accumulated = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    arguments = TrainingArguments(output_dir=directory, **accumulated, **QUIET)
    return _run(PackedTrainer, Documents(), arguments, stops, resume)


def _stream(directory, endless=False, stops=None, resume=None):
    """A stream whose processes get unequally many rows of each epoch.

    An endless one begins again where it ends, in another order.
    """
    documents = Documents()
    examples = [{**documents[i], "input_ids": documents.tokens[i].tolist()} for i in range(103)]
    stream = datasets.Dataset.from_list(examples).to_iterable_dataset(num_shards=4)
    if endless:
        stream = stream.repeat(None).shuffle(seed=0, buffer_size=20)
    apart = {"max_steps": 40, "per_device_train_batch_size": 1, "accelerator_config": {"dispatch_batches": False}}
    rows = autopack.pack(stream, CAPACITY, buffer_size=16)
    return _run(Streams, rows, TrainingArguments(output_dir=directory, **apart, **QUIET), stops, resume)


def _rank(rank, directory):
    whole = _train(f"{directory}/whole")
    steps = whole.state.max_steps
    at = steps // 2 + steps // 4  # half of the second epoch
    first = _train(f"{directory}/stopped", stops=at)
    second = _train(f"{directory}/stopped", resume=f"{directory}/stopped/checkpoint-{at}")
    result = {"whole": whole.seen, "first": first.seen, "second": second.seen}
    stream = _stream(f"{directory}/stream")
    result["stream"] = {"epoch": stream.state.epoch, "seen": stream.seen}
    if hasattr(datasets.IterableDataset, "repeat"):
        endless = f"{directory}/endless"
        resume = f"{endless}/checkpoint-27"
        runs = _stream(endless, True), _stream(endless, True, 27), _stream(endless, True, resume=resume)
        result["endless"] = [run.seen for run in runs]
    found, expected = (torch.nn.utils.parameters_to_vector(run.model.parameters()) for run in (second, whole))
    return {**result, "error": float((found - expected).abs().max())}
