"""Trainers of which each process has a part of the rows: they stop and go on, for
test_processes.py."""

import tempfile
from functools import partial

import datasets
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import autopack
from autopack import tiny
from tests.integration.documents import holds
from tests.support.trained import QUIET

DOCUMENTS = 203
CAPACITY = 60
STEPS = 40
"""Of streams: Trainer takes all of them for its first epoch, so a stream that ends is resumed
elsewhere."""
SETTINGS = {**QUIET, "remove_unused_columns": False, "logging_strategy": "no"}


class Documents(Dataset):
    """Random documents, by number."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.tokens = [
            draw.integers(3, 90, size=int(n)) for n in draw.integers(3, 25, size=DOCUMENTS)
        ]
        self.lengths = [len(tokens) for tokens in self.tokens]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "number": [index] * self.lengths[index]}


class Streams(Trainer):
    """Notes which documents it sees."""

    def training_step(self, model, inputs, *args):
        self.seen.append(sorted(set(inputs.pop("number").flatten().tolist())))
        return super().training_step(model, inputs, *args)


class PackedTrainer(Streams):
    """The trainer of docs/packing.md."""

    def get_train_dataloader(self):
        sampler = autopack.PackedBatchSampler(self.train_dataset.lengths, CAPACITY)
        loader = DataLoader(
            self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class _Stops(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_save = state.global_step == self.at


def _run(kind, rows, directory, stops=None, resume=None, **settings):
    model = tiny.build("llama", attn_implementation="sdpa").train()
    arguments = TrainingArguments(output_dir=directory, **settings, **SETTINGS)
    trainer = kind(model, arguments, train_dataset=rows, data_collator=autopack.PackingCollator())
    trainer.seen = []
    if stops is not None:
        trainer.add_callback(_Stops(stops))
    with autopack.enable(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def _by_a_sampler(directory, **more):
    accumulated = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    return _run(PackedTrainer, Documents(), directory, **accumulated, **more)


def _stream(directory, endless=False, **more):
    """Processes get unequally many rows of each epoch. An endless one begins again in another
    order."""
    documents = Documents()
    examples = [{**documents[i], "input_ids": documents.tokens[i].tolist()} for i in range(103)]
    stream = datasets.Dataset.from_list(examples).to_iterable_dataset(num_shards=4)
    if endless:
        stream = stream.repeat(None).shuffle(seed=0, buffer_size=20)
    apart = {"per_device_train_batch_size": 1, "accelerator_config": {"dispatch_batches": False}}
    return _run(
        Streams,
        autopack.pack(stream, CAPACITY, buffer_size=16),
        directory,
        max_steps=STEPS,
        **apart,
        **more,
    )


def _goes_on(_, train):
    """Whether a run that stops after three quarters is resumed where it was, and ends as a whole
    one does."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    whole, stopped = train(f"{folders[0]}/whole"), f"{folders[0]}/stopped"
    at = whole.state.max_steps * 3 // 4
    first, second = train(stopped, stops=at), train(stopped, resume=f"{stopped}/checkpoint-{at}")
    assert first.seen + second.seen == whole.seen
    return torch.equal(*(parameters_to_vector(run.model.parameters()) for run in (second, whole)))


def _unequal(_):
    """How many steps a process trains, whose epochs are others than those of the other one."""
    trainer = _stream(tempfile.mkdtemp())
    epochs = [None] * dist.get_world_size()
    dist.all_gather_object(epochs, trainer.state.epoch)
    assert len(set(epochs)) == len(epochs)
    return len(trainer.seen)


CASES = {
    "in its second epoch": (partial(_goes_on, train=_by_a_sampler), holds),
    "a stream": (_unequal, lambda found: found == STEPS),
}
if hasattr(datasets.IterableDataset, "repeat"):
    CASES["an endless stream"] = (partial(_goes_on, train=partial(_stream, endless=True)), holds)
