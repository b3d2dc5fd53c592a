"""Pairs in trainers of TRL: every step is that of every pair alone; and what is refused in them.

That trainers of pairs are as stock has them, tests/integration/test_prefixes_of_trainers.py and
compat/programs say."""

import datasets
import numpy as np
import pytest
import torch
import trl
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import autopack
from autopack import PackedBatchSampler, tiny
from autopack.packing import PackingCollator
from tests.engine import in_rows
from tests.packing.batches import WORDS, arguments, tokenizer
from tests.support import pages
from tests.support.dpo import preferences
from tests.support.refusals import refused
from tests.support.trained import losses_of

CAPACITY = 150
CLOSE = {"rel": 1e-5, "abs": 1e-5}
"""Rounding of float32: log-probabilities summed over a sequence are of order 100, with seven digits
each."""
BETA = 0.1
"""That of DPOConfig."""


def pairs(count=12, seed=0):
    """Text of 2 to 7 words, and two answers of 2 to 19."""
    draw = np.random.default_rng(seed)

    def text(least, most):
        return " ".join(draw.choice(WORDS, size=int(draw.integers(least, most))))

    return datasets.Dataset.from_list([
        {"prompt": f"{text(2, 8)} ", "chosen": f"{text(2, 20)} <eos>", "rejected": f"{text(2, 20)} <eos>"}
        for _ in range(count)
    ])  # fmt: skip


def moved(model, by=0.02):
    """The model with other parameters: a policy that its reference is not."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(by * noise.to(parameter.dtype))
    return model


def score(model, example, answer):
    """Sum of the log-probabilities of an answer's tokens, its sequence alone."""
    prompt, ids = (
        len(example["prompt_ids"]),
        torch.tensor([example["prompt_ids"] + example[answer]]),
    )
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, ids[0, prompt:, None]).sum())


def losses_alone(policy, reference, data):
    """DPO's loss of each pair, of its four sequences each run alone by stock models."""
    scores = [
        [
            score(policy, example, answer) - score(reference, example, answer)
            for answer in ("chosen_ids", "rejected_ids")
        ]
        for example in data
    ]
    chosen, rejected = torch.tensor(scores, dtype=torch.float64).T
    return -logsigmoid(BETA * (chosen - rejected)).numpy()


def expected(trainer, losses):
    """The means over the pairs of each step of three epochs, by the plan."""
    made = (trainer.data_collator([pair]) for pair in trainer.train_dataset)
    lengths = [int(batch["attention_mask"].sum()) for batch in made]
    sampler = PackedBatchSampler(lengths, CAPACITY, seed=trainer.args.seed)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found += [losses[batch].mean() for batch in sampler]
    assert np.std(found) > 1e-3, "losses must differ"
    return found


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
        refused(
            "trainer-loses-documents", match="function made rows of several documents, and DPO"
        ),
    ):
        trainer.train()
    stock.train()
    assert np.isfinite(losses_of(stock)).all(), (
        "control: it is trained on, as if each row were one sequence"
    )


# The recipe


def _run(model_type, folder, **options):
    """The trainer of the recipe, whose reference is the model as it was saved."""
    tiny.build(model_type).save_pretrained(folder / "model")
    names = {
        "autopack": autopack,
        "DataLoader": DataLoader,
        "DPOTrainer": trl.DPOTrainer,
        "DPOConfig": lambda: arguments(folder, trl.DPOConfig, **options),
        "model": moved(AutoModelForCausalLM.from_pretrained(folder / "model")),
        "dataset": pairs(),
        "tokenizer": tokenizer(),
    }
    (block,) = pages.blocks("packing.md#pairs")
    assert block.code.count("max_length=8192") == 1
    pages.run(block, names, {"max_length=8192": f"max_length={CAPACITY}"})
    return names["trainer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba"])
def test_the_recipe_trains_on_every_pair_alone(model_type, tmp_path):
    trainer = _run(model_type, tmp_path, learning_rate=0.0)
    policy, reference = moved(tiny.build(model_type)), tiny.build(model_type)
    alone = losses_alone(policy.eval(), reference.eval(), trainer.train_dataset)
    assert losses_of(trainer) == pytest.approx(expected(trainer, alone), **CLOSE)
