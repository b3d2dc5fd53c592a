"""Pairs in trainers of TRL: the recipe of the page, and what is refused in them.

That trainers of pairs are as stock has them, tests/integration/test_prefixes_of_trainers.py and
compat/programs say."""

import datasets
import numpy as np
import pytest
import torch
import trl
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import autopack
from autopack import tiny
from autopack.packing import PackingCollator
from compat.neighbours.measure import perturb
from tests.engine import in_rows
from tests.packing.batches import arguments, tokenizer
from tests.support import pages
from tests.support.dpo import PAIRS, preferences
from tests.support.refusals import refused
from tests.support.trained import losses_of

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
    trainer, stock = (preferences(tmp_path, tiny.build("llama")) for _ in range(2))
    for each in (trainer, stock):
        each.data_collator, each.args.max_steps = _rows, 1
    with (
        autopack.enable(trainer),
        refused("trainer-loses-documents"),
    ):
        trainer.train()
    stock.train()
    assert np.isfinite(losses_of(stock)).all(), (
        "control: it is trained on, as if each row were one sequence"
    )


# The recipe


def _run(model_type, folder, **instead):
    """Train as the recipe says, with a reference that is the model as it was saved; its losses."""
    tiny.build(model_type).save_pretrained(folder / "model")
    names = {
        "autopack": autopack,
        "DataLoader": DataLoader,
        "DPOTrainer": trl.DPOTrainer,
        "DPOConfig": lambda: arguments(folder, trl.DPOConfig, learning_rate=0.0),
        "model": perturb(AutoModelForCausalLM.from_pretrained(folder / "model"), 0.02),
        "dataset": datasets.Dataset.from_dict(PAIRS),
        "tokenizer": tokenizer(),
    }
    (block,) = pages.blocks("packing.md#pairs")
    assert block.code.count("max_length=8192") == 1
    pages.run(block, names, {"max_length=8192": "max_length=150", **instead})
    assert autopack.is_enabled(names["trainer"]) is not bool(instead)
    return losses_of(names["trainer"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba"])
def test_the_recipe_trains_as_stock_does(model_type, tmp_path):
    stock = _run(model_type, tmp_path, **{"autopack.enable(trainer)": ""})
    assert np.std(stock) > 1e-3, "losses must differ"
    assert _run(model_type, tmp_path) == pytest.approx(stock, rel=1e-5, abs=1e-5)
