"""Pairs in trainers of TRL: every step is that of stock, and of every pair alone; and what is refused in them."""

import re
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import trl
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import autopack
from autopack import PackedBatchSampler, tiny
from autopack.packing import PackingCollator, pair_lengths
from autopack.runtime.padding_read import LOOKS
from tests.engine import in_rows
from tests.packing.batches import arguments, logged, tokenizer
from tests.packing.preference import dpo, losses_alone, moved, pairs, steps
from tests.support.refusals import refused

CAPACITY = 150
CLOSE = {"rel": 1e-5, "abs": 1e-5}
"""Rounding of float32: log-probabilities summed over a sequence are of order 100, with seven digits each."""
DOCS = Path(autopack.__file__).parents[1] / "docs" / "packing.md"


class Planned:
    """What the recipe adds to a trainer, with rows small enough for a few pairs."""

    def get_train_dataloader(self):
        lengths = pair_lengths(self.train_dataset, self.data_collator)
        sampler = PackedBatchSampler(lengths, max_length=CAPACITY, seed=self.args.seed)
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        )


class PlannedDPO(Planned, trl.DPOTrainer):
    pass


def expected(trainer, losses, epochs=1):
    """The means over the pairs of each step, by the plan."""
    lengths = pair_lengths(trainer.train_dataset, trainer.data_collator)
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
    for (loss, metrics, gradients), (loss_, metrics_, gradients_) in zip(wanted, found, strict=True):
        assert loss_ == pytest.approx(loss, **CLOSE)
        assert metrics_ == pytest.approx(metrics, **CLOSE)
        for a, b in zip(gradients, gradients_, strict=True):
            # Of a whole gradient, whose rounding is that of its largest entries.
            assert float((a - b).abs().max()) <= 2e-5 * max(float(a.abs().max()), 1e-3)
    assert handle.handles["model"].tally.padding > 0
    assert all(set(of_model.tally.left) <= {LOOKS} for of_model in handle.handles.values())
    return handle


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba", "gpt_neox", "mixtral"])
def test_dpo_is_stocks(model_type, tmp_path):
    """Of mixtures with the loss of their router."""
    handle = compare(lambda: dpo(tmp_path, model_type, PlannedDPO))
    assert list(handle.handles) == ["model", "ref_model"]
    assert handle.handles["ref_model"].tally.padding > 0


LOSSES = {
    "ipo": {"loss_type": ["ipo"]},
    "hinge, normalised": {"loss_type": ["hinge", "sigmoid_norm"], "loss_weights": [1.0, 0.5]},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "exo, aot": {"loss_type": ["exo_pair", "aot", "aot_unpaired"], "label_smoothing": 0.1},
    "more": {"loss_type": ["nca_pair", "apo_zero", "apo_down", "discopop", "bco_pair", "sppo_hard", "sft"]},
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


def _lora():
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.mark.parametrize("given_by", ["trainer", "user"])
def test_peft_whose_reference_is_the_policy(given_by, tmp_path):
    def make():
        model, extra = tiny.build("llama"), {"peft_config": _lora()}
        if given_by == "user":
            model, extra = peft.get_peft_model(model, _lora()), {}
        args = arguments(tmp_path, trl.DPOConfig)
        return PlannedDPO(model, args=args, train_dataset=pairs(), processing_class=tokenizer(), **extra)

    handle = compare(make)
    assert list(handle.handles) == ["model"]
    batches = len(make().get_train_dataloader())
    assert handle.handles["model"].tally.batches == 2 * batches, "the policy and its base"


def _reward(folder, model_type, kind=trl.RewardTrainer, **options):
    config = tiny.build(model_type).config
    config.num_labels = 1
    torch.manual_seed(0)
    model = moved(AutoModelForSequenceClassification.from_config(config), 0.1)
    data = pairs().map(lambda pair: {"margin": float(len(pair["prompt"])) / 50})
    args = arguments(folder, trl.RewardConfig, **options)
    return kind(model, args=args, train_dataset=data, processing_class=tokenizer())


@pytest.mark.parametrize("model_type", ["llama", "bloom", "gpt_neox"])
def test_reward_is_stocks_and_that_of_every_pair_alone(model_type, tmp_path):
    class Kind(Planned, trl.RewardTrainer):
        pass

    compare(lambda: _reward(tmp_path, model_type, Kind, center_rewards_coefficient=0.1))
    trainer, stock = _reward(tmp_path, model_type, Kind), _reward(tmp_path, model_type).model.eval()
    losses = []
    for pair in trainer.train_dataset:
        with torch.no_grad():
            both = [stock(input_ids=torch.tensor([pair[f"{name}_ids"]])).logits for name in ("chosen", "rejected")]
        losses.append(float(-torch.nn.functional.logsigmoid(both[0] - both[1] - pair["margin"])))
    autopack.enable(trainer)
    assert [loss for loss, *_ in steps(trainer)] == pytest.approx(expected(trainer, np.array(losses)), **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["orpo", "cpo"])
def test_trainers_that_make_pairs_of_two_tensors(name, tmp_path):
    module = pytest.importorskip(f"trl.experimental.{name}")
    trainer, config = (getattr(module, f"{name.upper()}{part}") for part in ("Trainer", "Config"))
    kind = type(name, (Planned, trainer), {})

    def make():
        args = arguments(tmp_path, config)
        return kind(tiny.build("llama"), args=args, train_dataset=pairs(), processing_class=tokenizer())

    compare(make)


def test_evaluation(tmp_path):
    stock, enabled = (dpo(tmp_path, eval_dataset=pairs(7, seed=1), per_device_eval_batch_size=3) for _ in range(2))
    autopack.enable(enabled)
    wanted, found = stock.evaluate(), enabled.evaluate()
    names = [name for name in wanted if not re.search("runtime|per_second", name)]
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, **CLOSE)


# Rows of several documents in a trainer of pairs


def _rows(examples):
    """All chosen sequences as one packed row, and all rejected ones as another."""
    collate = PackingCollator(labels="completions")
    rows = [
        collate([{"prompt_ids": pair["prompt_ids"], "completion_ids": [pair[answer]]} for pair in examples])
        for answer in ("chosen_ids", "rejected_ids")
    ]
    names = ("input_ids", "position_ids", "completion_mask")
    batch = {name: in_rows([row[name][0] for row in rows]) for name in names}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_rows_of_several_sequences_are_refused(tmp_path):
    trainer = dpo(tmp_path, data_collator=_rows, max_steps=1)
    with (
        autopack.enable(trainer),
        refused("trainer-loses-documents", match="function made rows of several documents, and DPO"),
    ):
        trainer.train()
    stock = dpo(tmp_path, data_collator=_rows, max_steps=1)
    stock.train()
    assert np.isfinite(logged(stock)).all(), "control: it is trained on, as if each row were one sequence"


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
    given |= {"DPOConfig": lambda: arguments(folder, trl.DPOConfig, **options), "model": model, "dataset": pairs()}
    exec(code, given | {"tokenizer": tokenizer()}, found := {**given, "tokenizer": tokenizer()})
    return found["trainer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "bloom", "mamba"])
def test_the_recipe_trains_on_every_pair_alone(model_type, tmp_path):
    trainer = _run(_recipe(), model_type, tmp_path, learning_rate=0.0)
    policy, reference = moved(tiny.build(model_type)), tiny.build(model_type)
    alone = losses_alone(policy.eval(), reference.eval(), trainer.train_dataset)
    assert logged(trainer) == pytest.approx(expected(trainer, alone, epochs=3), **CLOSE)
