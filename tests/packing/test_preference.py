"""Pairs in trainers of TRL: every step is that of stock, and of every pair alone; and what is
refused in them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import autopack
from autopack import PackedBatchSampler, tiny
from autopack.packing import PackingCollator
from autopack.runtime.padding_read import LOOKS
from tests.engine import in_rows
from tests.packing.batches import arguments, logged, tokenizer
from tests.packing.preference import dpo, losses_alone, moved, pairs, steps
from tests.support.refusals import refused

CAPACITY = 150
CLOSE = {"rel": 1e-5, "abs": 1e-5}
"""Rounding of float32: log-probabilities summed over a sequence are of order 100, with seven digits
each."""
DOCS = Path(autopack.__file__).parents[1] / "docs" / "packing.md"


def lengths_of(trainer):
    """Tokens of both sequences of each pair."""
    made = [trainer.data_collator([pair]) for pair in trainer.train_dataset]
    names = "attention_mask", "chosen_attention_mask", "rejected_attention_mask"
    return [sum(int(batch[name].sum()) for name in names if name in batch) for batch in made]


class Planned:
    """What the recipe adds to a trainer, with rows small enough for a few pairs."""

    def get_train_dataloader(self):
        lengths = lengths_of(self)
        sampler = PackedBatchSampler(lengths, max_length=CAPACITY, seed=self.args.seed)
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        )


class PlannedDPO(Planned, trl.DPOTrainer):
    pass


def expected(trainer, losses, epochs=1):
    """The means over the pairs of each step, by the plan."""
    lengths = lengths_of(trainer)
    sampler = PackedBatchSampler(lengths, CAPACITY, seed=trainer.args.seed)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        found += [losses[batch].mean() for batch in sampler]
    assert np.std(found) > 1e-3, "losses must differ"
    return found


# Steps are those of stock, and of every pair alone


def compare(make):
    """Stock and enabled, batch by batch over an epoch; returns the handle of the latter."""
    torch.manual_seed(0)
    stock = make()
    torch.manual_seed(0)
    enabled = make()
    handle = autopack.enable(enabled)
    wanted, found = steps(stock), steps(enabled)
    assert len(wanted) == len(found)
    for (loss, metrics, gradients), (loss_, metrics_, gradients_) in zip(
        wanted, found, strict=True
    ):
        assert loss_ == pytest.approx(loss, **CLOSE)
        assert metrics_ == pytest.approx(metrics, **CLOSE)
        for a, b in zip(gradients, gradients_, strict=True):
            # Of a whole gradient, whose rounding is that of its largest entries.
            assert float((a - b).abs().max()) <= 2e-5 * max(float(a.abs().max()), 1e-3)
    assert handle.models["model"].tally.padding > 0
    assert all(set(of_model.tally.left) <= {LOOKS} for of_model in handle.models.values())
    return handle


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba", "gpt_neox", "mixtral"])
def test_dpo_is_stocks(model_type, tmp_path):
    """Of mixtures with the loss of their router."""
    handle = compare(lambda: dpo(tmp_path, model_type, PlannedDPO))
    assert list(handle.models) == ["model", "ref_model"]
    assert handle.models["ref_model"].tally.padding > 0


LOSSES = {
    "ipo": {"loss_type": ["ipo"]},
    "hinge, normalised": {"loss_type": ["hinge", "sigmoid_norm"], "loss_weights": [1.0, 0.5]},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "exo, aot": {"loss_type": ["exo_pair", "aot", "aot_unpaired"], "label_smoothing": 0.1},
    "more": {
        "loss_type": [
            "nca_pair",
            "apo_zero",
            "apo_down",
            "discopop",
            "bco_pair",
            "sppo_hard",
            "sft",
        ]
    },
    "ld": {"ld_alpha": 0.5},
    "wpo": {"use_weighting": True},
    "alpha": {"f_divergence_type": "alpha_divergence"},
    "cut": {"max_length": 12},
    "cut at the beginning": {"max_length": 12, "truncation_mode": "keep_end"},
    "no checkpointing": {"gradient_checkpointing": False},
    "reference first": {"precompute_ref_log_probs": True},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOSSES)
def test_options_of_dpo(name, tmp_path):
    compare(lambda: dpo(tmp_path, "llama", PlannedDPO, **LOSSES[name]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["orpo", "cpo"])
def test_trainers_that_make_pairs_of_two_tensors(name, tmp_path):
    module = pytest.importorskip(f"trl.experimental.{name}")
    trainer, config = (getattr(module, f"{name.upper()}{part}") for part in ("Trainer", "Config"))
    kind = type(name, (Planned, trainer), {})

    def make():
        args = arguments(tmp_path, config)
        return kind(
            tiny.build("llama"), args=args, train_dataset=pairs(), processing_class=tokenizer()
        )

    compare(make)


# Rows of several documents in a trainer of pairs


def _rows(examples):
    """All chosen sequences as one packed row, and all rejected ones as another."""
    collate = PackingCollator(labels="completions")
    rows = [
        collate(
            [
                {"prompt_ids": pair["prompt_ids"], "completion_ids": [pair[answer]]}
                for pair in examples
            ]
        )
        for answer in ("chosen_ids", "rejected_ids")
    ]
    names = ("input_ids", "position_ids", "completion_mask")
    batch = {name: in_rows([row[name][0] for row in rows]) for name in names}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_rows_of_several_sequences_are_refused(tmp_path):
    trainer = dpo(tmp_path, data_collator=_rows, max_steps=1)
    with (
        autopack.enable(trainer),
        refused(
            "trainer-loses-documents", match="function made rows of several documents, and DPO"
        ),
    ):
        trainer.train()
    stock = dpo(tmp_path, data_collator=_rows, max_steps=1)
    stock.train()
    assert np.isfinite(logged(stock)).all(), (
        "control: it is trained on, as if each row were one sequence"
    )


# The recipe


def _recipe():
    text = DOCS.read_text()
    section = text[text.index("\n## Pairs\n") : text.index("\n## Streams\n")]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert code.count("max_length=8192") == 1
    return code.replace("max_length=8192", f"max_length={CAPACITY}")


def _run(code, model_type, folder, **options):
    """The trainer of the recipe, whose reference is the model as it was saved."""
    tiny.build(model_type).save_pretrained(folder / "model")
    model = moved(AutoModelForCausalLM.from_pretrained(folder / "model"))
    given = {"autopack": autopack, "DataLoader": DataLoader, "DPOTrainer": trl.DPOTrainer}
    given |= {
        "DPOConfig": lambda: arguments(folder, trl.DPOConfig, **options),
        "model": model,
        "dataset": pairs(),
    }
    exec(code, given | {"tokenizer": tokenizer()}, found := {**given, "tokenizer": tokenizer()})
    return found["trainer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba"])
def test_the_recipe_trains_on_every_pair_alone(model_type, tmp_path):
    trainer = _run(_recipe(), model_type, tmp_path, learning_rate=0.0)
    policy, reference = moved(tiny.build(model_type)), tiny.build(model_type)
    alone = losses_alone(policy.eval(), reference.eval(), trainer.train_dataset)
    assert logged(trainer) == pytest.approx(expected(trainer, alone, epochs=3), **CLOSE)
