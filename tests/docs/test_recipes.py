"""The code of docs/packing.md, run as it stands there: losses are those of the documents alone."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import autopack
from autopack import tiny
from tests.support import pages

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
"""What has nothing to do with batches; all else is a trainer's default."""
TYPES = ["llama", "bloom", "mamba", "gpt_neo"]
"""Bloom and Mamba name no `position_ids`, and GPT-Neo calls its layers and attention by other names than Llama."""
CAPACITY = 64
ROUNDING = 1e-5
"""float32; a loss of documents that see each other is off by 1e-2 or more."""
ELSEWHERE = {
    "class PackedDPOTrainer": "tests/packing/test_preference.py",
    "ray.data": "tests/packing/test_ray.py",
    "autopack.packing.HostBatch(batch)": "tests/runtime/test_host_reads.py",
}
"""Recipes that other tests run: what is in them, and where."""


BLOCKS = [block.code for block in pages.blocks("packing.md")]


def recipe(*marks: str) -> str:
    """The one block with these words, for rows of `CAPACITY` tokens."""
    (found,) = [block for block in BLOCKS if all(mark in block for mark in marks)]
    return found.replace("4096", str(CAPACITY))


RECIPES = {
    "plan": ("plan.fill", "plan.save"),
    "ranks": ("CostModel.for_model",),
    "loop": ("for epoch in range(3)", "sampler.set_epoch"),
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
def _there(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What the recipes take for granted."""
    model = tiny.build(request.param).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    draw = np.random.default_rng(0)
    documents = [draw.integers(3, 90, size=int(n)).tolist() for n in draw.integers(4, 30, size=24)]
    return {
        "autopack": autopack,
        "model": model,
        "stock": copy.deepcopy(model),
        "documents": documents,
        "lengths": [len(d) for d in documents],
        "dataset": Dataset.from_list([{"input_ids": d} for d in documents]),
        "output_dir": str(tmp_path),
        "args": TrainingArguments(str(tmp_path), num_train_epochs=1, logging_steps=1, **QUIET),
        "Trainer": Trainer,
        "DataLoader": DataLoader,
    }


def run(there: dict[str, Any], name: str, *before: str) -> dict[str, Any]:
    """Run a recipe, after others that it goes on from."""
    for each in (*before, name):
        exec(recipe(*RECIPES[each]), there)
    return there


def alone(there: dict[str, Any], documents: list[list[int]], by_document: bool = False) -> float:
    """The mean loss over all targets of documents by themselves, or over documents of each one's mean."""
    losses, counts = [], []
    for document in documents:
        ids = torch.tensor([document])
        losses.append(there["stock"](input_ids=ids, labels=ids, use_cache=False).loss.item())
        counts.append(1 if by_document else len(document) - 1)
    return float(np.average(losses, weights=counts))


def documents_in(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The documents of a batch of the collator."""
    starts = (batch["position_ids"] == 0).flatten().nonzero().flatten().tolist()
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
    ids = batch["input_ids"].flatten()
    ends = [*starts[1:], len(ids)]
    parts = [ids[a:b][real[a:b]].tolist() for a, b in zip(starts, ends, strict=True)]
    return [part for part in parts if part]


def first_loss(trainer: Any) -> float:
    return trainer.state.log_history[0]["loss"]


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= ROUNDING * max(1.0, abs(expected))


@pytest.mark.parametrize("there", ["llama"], indirect=True)
def test_plans(there, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    made = run(there, "plan")["plan"]
    assert made == autopack.packing.plan(there["lengths"], CAPACITY)
    assert len(run(there, "ranks")["plan"]) % 8 == 0


@pytest.mark.parametrize("there", ["llama"], indirect=True)
def test_groups(there):
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, 90, size=20).tolist() for _ in range(6)]
    documents = [prompt + draw.integers(3, 90, size=5).tolist() for prompt in prompts for _ in range(4)]
    there["dataset"] = Dataset.from_list([{"input_ids": document} for document in documents])
    there["lengths"], there["groups"] = [25] * 24, np.repeat(np.arange(6), 4)
    there["prefixes"] = [20] * 24
    run(there, "groups")
    assert len(there["rows"]) == len(there["plan"]) == 6  # four documents of 25 tokens each, 40 of them to compute
    assert sorted(sum(there["sampler"], [])) == list(range(24))  # noqa: RUF017
    batch = there["collator"]([{"prompt_ids": prompts[0], "completion_ids": [[5], [6]]}])
    assert batch["input_ids"].shape == (1, 42)


def test_a_loop_over_a_loader(there):
    seen = []
    code = recipe(*RECIPES["loop"]).replace("...", "step(batch)")

    def step(batch: Any) -> None:
        if len(seen) < 3:
            assert close(there["model"](**batch).loss.item(), alone(there, documents_in(batch)))
        seen.extend(documents_in(batch))

    with autopack.enable(there["model"]):
        exec(code, there | {"step": step})
    assert sorted(map(tuple, seen)) == sorted([tuple(d) for d in there["documents"]] * 3)


def test_accelerate(there):
    from accelerate import Accelerator

    collate, seen = autopack.PackingCollator(), []

    class Noting(Accelerator):
        def backward(self, loss: Any, **options: Any) -> None:
            if not seen:
                there["first"] = loss.item()
            seen.append(None)
            super().backward(loss, **options)

    sampler = autopack.PackedBatchSampler(there["lengths"], CAPACITY)
    first = next(iter(DataLoader(there["dataset"], batch_sampler=sampler, collate_fn=collate)))
    there["optimizer"] = torch.optim.SGD(there["model"].parameters(), 1e-3)
    there["loader"] = DataLoader(there["dataset"], batch_sampler=sampler, collate_fn=collate)
    there["accelerator"] = Noting(cpu=True)
    run(there, "accelerate")
    assert close(there["first"], alone(there, documents_in(first)))
    assert len(seen) == 3 * len(sampler)
    autopack.disable(there["model"])


def test_a_trainer_with_the_sampler(there):
    run(there, "Trainer with a sampler", "loop")
    collate = autopack.PackingCollator()
    trainer = there["PackedTrainer"](
        there["model"], there["args"], train_dataset=there["dataset"], data_collator=collate
    )
    first = next(iter(trainer.get_train_dataloader()))
    with autopack.enable(trainer):
        trainer.train()
    assert close(first_loss(trainer), alone(there, documents_in(first)))


def test_batches_of_one_shape(there):
    run(there, "shapes")
    shapes = set()
    with autopack.enable(there["model"]):
        for indices in there["sampler"]:
            batch = there["collate"]([there["dataset"][i] for i in indices])
            shapes.add((batch["input_ids"].shape, len(batch["cu_seq_lens_q"])))
            for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
                batch.pop(name)  # not every forward has a place for them
            found = there["model"](**batch).loss.item()
            assert close(found, alone(there, [there["documents"][i] for i in indices]))
    assert len(shapes) == 1


def test_a_trainer_of_packed_rows(there):
    run(there, "Trainer")
    assert len(there["trainer"].state.log_history) == 2  # one step: all documents
    assert close(first_loss(there["trainer"]), alone(there, there["documents"]))
    autopack.disable(there["trainer"])


@pytest.mark.parametrize("there", ["llama", "gpt_neo"], indirect=True)
def test_trls_trainer(there):
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(90)}, unk_token="t0"))
    there["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    there["rows"] = autopack.pack(there["dataset"], CAPACITY)
    there["SFTConfig"] = partial(trl.SFTConfig, **QUIET, bf16=False, logging_steps=1, num_train_epochs=1)
    there["SFTTrainer"] = trl.SFTTrainer
    run(there, "SFTTrainer")
    assert close(first_loss(there["trainer"]), alone(there, there["documents"]))
    autopack.disable(there["trainer"])


def test_streams(there):
    there["dataset"] = there["dataset"].to_iterable_dataset()
    collate = autopack.PackingCollator()
    rows = run(there, "stream")["rows"]
    with autopack.enable(there["model"]):
        for row in list(rows)[:2]:
            batch = collate([row])
            assert close(there["model"](**batch).loss.item(), alone(there, documents_in(batch)))


@pytest.mark.sampled(1)
def test_a_trainer_of_an_endless_stream(there):
    there["dataset"] = there["dataset"].to_iterable_dataset()
    code = recipe(*RECIPES["endless stream"]).replace("...", "output_dir").replace("10_000)", "3)")
    code = code.replace("max_steps=10_000", "max_steps=3")
    there["TrainingArguments"] = partial(TrainingArguments, **QUIET, logging_steps=1)
    exec(code, there)
    trainer = there["trainer"]
    first = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    assert trainer.state.global_step == 3
    assert close(first_loss(trainer), alone(there, documents_in(first)))
    autopack.disable(trainer)


def test_weights_of_documents(there):
    there["rows"] = autopack.pack(there["dataset"], CAPACITY)
    there["args"].per_device_train_batch_size, there["args"].gradient_accumulation_steps = 2, 100
    run(there, "weights")
    there["trainer"].train()
    assert there["trainer"].state.global_step == 1
    assert close(first_loss(there["trainer"]), alone(there, there["documents"], by_document=True))
    assert not close(alone(there, there["documents"]), alone(there, there["documents"], by_document=True)), "control"
    autopack.disable(there["trainer"])


def test_weights_in_a_loop(there, monkeypatch):
    examples = [{"input_ids": d} for d in there["documents"]]
    there["micro_batches"] = [examples[:7], examples[7:16], examples[16:]]
    losses = []
    weighted = autopack.packing.weighted_loss

    def noting(*args: Any, **options: Any) -> Any:
        losses.append(weighted(*args, **options))
        return losses[-1]

    monkeypatch.setattr(autopack.packing, "weighted_loss", noting, raising=False)
    with autopack.enable(there["model"]):
        run(there, "weights in a loop")
    found = sum(loss.item() for loss in losses)
    assert close(found, alone(there, there["documents"], by_document=True))


@pytest.mark.parametrize("there", ["llama"], indirect=True)
def test_an_array_of_jobs(there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there["dataset"].save_to_disk("corpus")
    there |= {"datasets": datasets, "os": os}
    documents = there["dataset"]
    for job in range(3):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(job))
        exec(recipe(*RECIPES["shards"]).replace("num_shards=64", "num_shards=3"), there)
    rows = run(there, "files of shards")["rows"]
    assert list(rows) == list(autopack.pack(documents, CAPACITY))
