"""The code of docs/packing.md, and of a section beside it, as it stands there: losses are those of
documents alone."""

import copy
import os
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import Trainer

import autopack
from tests.packing.batches import (
    arguments,
    documents_in,
    in_training,
    loss_alone,
    tokenizer,
)
from tests.support import pages
from tests.support.trained import losses_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TYPES = ["llama", "bloom", "mamba", "gpt_neo"]
"""Bloom and Mamba name no `position_ids`, and GPT-Neo calls its layers and attention by other names
than Llama."""
CAPACITY = 64
ROUNDING = 1e-5
"""float32; a loss of documents that see each other is off by 1e-2 or more."""
ELSEWHERE = {
    "class PackedDPOTrainer": "tests/packing/test_preference.py",
    "ray.data": "tests/packing/test_ray.py",
    "autopack.packing.HostBatch(batch)": "tests/runtime/test_host_reads.py",
}
"""Recipes that other tests run: what is in them, and where."""


BLOCKS = [
    block.code
    for name in ("packing.md", "losses.md#every-document-alike")
    for block in pages.blocks(name)
]


def recipe(*marks):
    """The one block with these words, for rows of `CAPACITY` tokens."""
    (found,) = [block for block in BLOCKS if all(mark in block for mark in marks)]
    return found.replace("4096", str(CAPACITY))


RECIPES = {
    "plan": ("plan.fill",),
    "ranks": ("CostModel.for_model",),
    "loop": ("for epoch in range(3)", "sampler.set_epoch"),
    "resume": ("again.load_state_dict(saved)",),
    "accelerate": ("accelerator.prepare(model, optimizer, loader)",),
    "Trainer with a sampler": ("class PackedTrainer(Trainer)",),
    "shapes": ("shape = dict(",),
    "Trainer": ("autopack.pack(dataset, 4096)", "Trainer(model, args"),
    "SFTTrainer": ("SFTConfig(output_dir",),
    "stream": ("# an IterableDataset",),
    "endless stream": ("dataset.repeat(None)",),
    "weights": ("class WeighedTrainer(Trainer)",),
    "weights in a loop": ("for batch in batches:", "autopack.packing.weighted_loss("),
    "groups": ("groups=True", 'labels="completions"'),
    "shards": ("SLURM_ARRAY_TASK_ID",),
    "files of shards": ("autopack.packing.shard_files(",),
}


def test_every_recipe_of_the_page_is_run():
    for block in BLOCKS:
        known = [name for name, marks in RECIPES.items() if all(mark in block for mark in marks)]
        known += [where for mark, where in ELSEWHERE.items() if mark in block]
        assert len(known) == 1, block


@pytest.fixture(name="there", params=TYPES)
def _there(request, tmp_path):
    """What the recipes take for granted."""
    model = in_training(request.param)
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 90, size=int(n)).tolist() for n in draw.integers(4, 30, size=24)]
    return {
        "autopack": autopack,
        "model": model,
        "stock": copy.deepcopy(model),
        "documents": documents,
        "lengths": [len(d) for d in documents],
        "groups": np.repeat(np.arange(6), 4),
        "prefixes": [4] * 24,
        "dataset": Dataset.from_list([{"input_ids": d} for d in documents]),
        "collate": autopack.PackingCollator(),
        "output_dir": str(tmp_path),
        "args": arguments(tmp_path, num_train_epochs=1),
        "Trainer": Trainer,
        "DataLoader": DataLoader,
    }


only_llama = pytest.mark.parametrize("there", ["llama"], indirect=True)


def run(there, *names, **instead):
    """Run recipes, one after the other, with other words `instead` of some."""
    for name in names:
        code = recipe(*RECIPES[name])
        for words, others in instead.items():
            code = code.replace(words, others)
        exec(code, there)
    return there


def alone(there, documents, by_document=False):
    """The mean loss over all targets of documents by themselves, or over documents of each one's
    mean."""
    weights = [1.0] * len(documents) if by_document else None
    return pytest.approx(loss_alone(there["stock"], documents, weights).item(), rel=ROUNDING)


TOGETHER = {
    "plans": (("plan", "ranks"), {}),
    "resumed": (("loop", "resume"), {"...": "break"}),
    "accelerate": (("loop", "accelerate"), {"...": "break"}),
    "shapes": (("shapes",), {}),
    "stream": (("stream",), {"= dataset.": "= dataset.to_iterable_dataset()."}),
    "groups": (("groups",), {}),
    "shards": (("shards", "files of shards"), {"]), 64": "]), 2"}),
}
"""Recipes that are run one after the other, and what stands for some of their words."""


@only_llama
@pytest.mark.parametrize("names", TOGETHER)
def test_recipes_run(there, names, tmp_path, monkeypatch):
    """What they give is tested beside the code that gives it (tests/packing)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    there["dataset"].save_to_disk("corpus")
    recipes, instead = TOGETHER[names]
    there |= {"datasets": datasets, "os": os, "accelerator": Accelerator(cpu=True)}
    there["optimizer"] = torch.optim.SGD(there["model"].parameters(), 1e-3)
    if names == "shards":
        run(there, "shards", **instead)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    made = run(there, *recipes, **instead)
    for batch in ([there["dataset"][i] for i in each] for each in made.get("sampler", ())):
        made["collate"](batch)
    for row in made.get("rows", ()):
        made["collate"]([row])
    if autopack.is_enabled(there["model"]):
        autopack.disable(there["model"])


def with_the_sampler(there):
    run(there, "loop", "Trainer with a sampler")
    given = {"train_dataset": there["dataset"], "data_collator": there["collate"]}
    trainer = there["PackedTrainer"](there["model"], there["args"], **given)
    autopack.enable(trainer)
    return trainer


def of_packed_rows(there):
    return run(there, "Trainer")["trainer"]


def of_trl(there):
    trl = pytest.importorskip("trl")
    if there["model"].config.model_type not in ("llama", "gpt_neo"):
        pytest.skip("TRL trains those whose forward names positions")
    there["tokenizer"], there["rows"] = tokenizer(), autopack.pack(there["dataset"], CAPACITY)
    there["SFTConfig"] = partial(arguments, kind=trl.SFTConfig, num_train_epochs=1)
    return run(there | {"SFTTrainer": trl.SFTTrainer}, "SFTTrainer")["trainer"]


def of_an_endless_stream(there):
    there["dataset"] = there["dataset"].to_iterable_dataset()
    instead = {"...": "output_dir", "10_000)": "3)", "max_steps=10_000": "max_steps=3"}
    return run(there | {"TrainingArguments": arguments}, "endless stream", **instead)["trainer"]


@pytest.mark.parametrize(
    ("make", "steps"),
    [(with_the_sampler, 7), (of_packed_rows, 1), (of_trl, 1), (of_an_endless_stream, 3)],
)
def test_trainers(there, make, steps):
    """Their first losses are those of the documents of the first step, which is all there are in
    two of them."""
    trainer = make(there)
    first = documents_in(next(iter(trainer.get_train_dataloader())))
    if not trainer.state.global_step:
        trainer.train()
    assert losses_of(trainer)[0] == alone(there, first)
    assert trainer.state.global_step == steps
    autopack.disable(trainer)


def test_weights_of_documents(there):
    there["rows"] = autopack.pack(there["dataset"], CAPACITY)
    there["args"].per_device_train_batch_size, there["args"].gradient_accumulation_steps = 2, 100
    trainer = run(there, "weights")["trainer"]
    trainer.train()
    assert trainer.state.global_step == 1
    assert losses_of(trainer)[0] == alone(there, there["documents"], by_document=True)
    assert losses_of(trainer)[0] != alone(there, there["documents"]), "control"
    autopack.disable(trainer)


def test_weights_in_a_loop(there, monkeypatch):
    examples = [{"input_ids": d} for d in there["documents"]]
    there["micro_batches"] = [examples[:7], examples[7:16], examples[16:]]
    losses = []
    weighted = autopack.packing.weighted_loss

    def noting(*args, **options):
        losses.append(weighted(*args, **options))
        return losses[-1]

    monkeypatch.setattr(autopack.packing, "weighted_loss", noting, raising=False)
    with autopack.enable(there["model"]):
        run(there, "weights in a loop")
    assert sum(loss.item() for loss in losses) == alone(there, there["documents"], by_document=True)
