"""Pairs: planned by the cost of both sequences, and trained as stock TRL trains each of them alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopack
from autopack import CostModel, InvalidPacking, PackedBatchSampler, pair_lengths, tiny
from autopack.packing.balance import imbalance

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
from torch.utils.data import DataLoader  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402

from tests.packing.preference import (  # noqa: E402
    arguments,
    dpo,
    losses_alone,
    moved,
    pairs,
    steps,
    tokenizer,
)

datasets.disable_progress_bars()
CLOSE = {"rel": 1e-5, "abs": 1e-5}
"""Rounding of float32: log-probabilities summed over a sequence are of order 100, with seven digits each."""
DOCS = Path(autopack.__file__).parents[1] / "docs" / "packing.md"
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.3, 0.8, (20_000, 2)), 4, 1024).astype(int)


class Planned:
    """What the recipe adds to a trainer, with rows small enough for a few pairs."""

    def get_train_dataloader(self: Any) -> Any:
        lengths = pair_lengths(self.train_dataset, self.data_collator)
        sampler = PackedBatchSampler(lengths, max_tokens=150, seed=self.args.seed)
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
        )


class PlannedDPO(Planned, trl.DPOTrainer):
    pass


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def expected(trainer: Any, losses: np.ndarray, max_tokens: int, epochs: int, accumulated: int) -> list[float]:
    """The means over the pairs of each step, by the plan."""
    lengths = pair_lengths(trainer.train_dataset, trainer.data_collator)
    sampler = PackedBatchSampler(lengths, max_tokens, seed=trainer.args.seed)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for first in range(0, len(batches), accumulated):
            found.append(losses[np.concatenate(batches[first : first + accumulated])].mean())
    return found


# Plans of several sequences per document


@given(
    st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=2, max_size=40),
    st.sampled_from(["best_fit", "first_fit", "random", "multipack"]),
    st.integers(1, 4),
)
def test_pairs_stay_together_and_cost_what_their_sequences_do(lengths, strategy, ranks):
    made = autopack.plan(lengths, 20, strategy, ranks=ranks, cost=CostModel(1, 1))
    given_ = np.array(lengths)
    assert sorted(made.documents.tolist()) == list(range(len(lengths)))
    wanted = [(given_[row] + given_[row] ** 2).sum() for row in made]
    assert made.costs(CostModel(1, 1)).tolist() == wanted
    assert made.tokens_per_row.tolist() == [given_[row].sum() for row in made]
    assert max(made.tokens_per_row) <= 20
    part = made[1:]
    assert part.costs(CostModel(1, 1)).tolist() == wanted[1:]


def test_ranks_have_like_work_by_the_squares_of_sequences():
    cost = CostModel(0, 1)
    squares = (LENGTHS**2).sum(axis=1)

    def slowest(lengths: np.ndarray) -> float:
        rows = autopack.plan(lengths, 8192, cost=cost, ranks=8)
        return float(imbalance(np.array([squares[row].sum() for row in rows]), 8).mean())

    assert slowest(LENGTHS) < 1.02
    assert slowest(LENGTHS.sum(axis=1)) > 1.05, "control: a pair taken for one document"


def test_a_plan_of_pairs_is_kept_whole(tmp_path):
    made = autopack.plan(LENGTHS[:50], 4096)
    made.save(tmp_path / "pairs.plan")
    again = autopack.Plan.load(tmp_path / "pairs.plan")
    assert again == made
    assert again.costs(CostModel()).tolist() == made.costs(CostModel()).tolist()
    assert made != autopack.plan(LENGTHS[:50].sum(axis=1), 4096)


def test_what_cuts_documents_is_refused_for_pairs():
    for options in ({"strategy": "fixed_length"}, {"overflow": "truncate"}, {"overflow": "split"}):
        with pytest.raises(ValueError, match="cuts documents, and lengths"):
            autopack.plan(LENGTHS, 4096, **options)
    with pytest.raises(ValueError, match="cuts documents, and lengths"):
        PackedBatchSampler(LENGTHS, 4096, overflow="truncate")
    with pytest.raises(InvalidPacking, match=r"over the 100 tokens of a row"):
        autopack.plan([[60, 60], [1, 1]], 100)


def test_a_sampler_of_pairs_does_not_go_on_from_one_of_documents():
    state = PackedBatchSampler(LENGTHS[:8].ravel()[:8], 4096).state_dict()
    with pytest.raises(InvalidPacking, match="lengths was"):
        PackedBatchSampler(LENGTHS[:8].ravel()[:8].reshape(4, 2), 4096).load_state_dict(state)


# Lengths


@pytest.mark.parametrize("most", [None, 12, 1])
def test_lengths_are_those_of_batches(most, tmp_path):
    trainer = dpo(tmp_path, max_length=10_000)
    trainer.data_collator.max_length = most
    data = trainer.train_dataset
    found = pair_lengths(data, trainer.data_collator)
    batch = trainer.data_collator([*data])
    assert found.dtype == np.int64
    assert found.T.ravel().tolist() == batch["attention_mask"].sum(dim=1).tolist()
    order = [*range(len(data))][::-2]
    assert (pair_lengths(data.select(order), trainer.data_collator) == found[order]).all()
    assert (pair_lengths([*data], trainer.data_collator) == found).all()
    transformed = data.with_transform(lambda rows: {name: rows[name] for name in rows if name.endswith("_ids")})
    assert (pair_lengths(transformed, trainer.data_collator) == found).all()


class TestRefusedLengths:
    def test_text(self, tmp_path):
        with pytest.raises(InvalidPacking, match="make the trainer first and pass its train_dataset"):
            pair_lengths(pairs(), dpo(tmp_path).data_collator)

    def test_no_pairs(self):
        with pytest.raises(InvalidPacking, match="these are no pairs"):
            pair_lengths([{"prompt_ids": [1], "completion_ids": [2], "label": True}], len)

    def test_a_stream(self, tmp_path):
        with pytest.raises(InvalidPacking, match="found IterableDataset"):
            pair_lengths(dpo(tmp_path).train_dataset.to_iterable_dataset(), len)

    def test_a_collator_that_cuts_elsewhere(self, tmp_path):
        """It may hide where it cuts; said, it is right."""
        trainer = dpo(tmp_path)
        data, inner = trainer.train_dataset, trainer.data_collator
        inner.max_length = 15
        hidden = lambda examples: inner(examples)  # noqa: E731
        with pytest.raises(InvalidPacking, match=r"<lambda> makes sequences of \[\d+, 15\]"):
            pair_lengths(data, hidden)
        assert (pair_lengths(data, hidden, max_length=15) == pair_lengths(data, inner)).all()
        with pytest.raises(InvalidPacking, match="max_length=9 say"):
            pair_lengths(data, inner, max_length=9)

    def test_a_collator_of_something_else(self, tmp_path):
        data = dpo(tmp_path).train_dataset
        with pytest.raises(InvalidPacking, match="PackingCollator makes no batch of it"):
            pair_lengths(data, autopack.PackingCollator())
        with pytest.raises(InvalidPacking, match="makes sequences of None"):
            pair_lengths(data, lambda examples: {"input_ids": examples})
        # A reward model would be trained on answers without their prompts.
        with pytest.raises(InvalidPacking, match="makes sequences of"):
            pair_lengths(data, trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0))

    def test_sequences_without_tokens(self):
        collator = trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0)
        with pytest.raises(InvalidPacking, match="pair 1: found no tokens in 'rejected_ids'"):
            pair_lengths([{"chosen_ids": [1], "rejected_ids": [2]}, {"chosen_ids": [1], "rejected_ids": []}], collator)


# Steps are those of stock, and of every pair alone


def compare(make: Any) -> Any:
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
    assert not any(of_model.tally.left for of_model in handle.handles.values())
    return handle


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


@pytest.mark.parametrize("name", LOSSES)
def test_options_of_dpo(name, tmp_path):
    compare(lambda: dpo(tmp_path, "llama", PlannedDPO, **LOSSES[name]))


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge", "robust"])
@pytest.mark.parametrize("most", [1024, 15])
def test_every_pair_alone(name, most, tmp_path):
    """Stock models on each sequence by itself, and the loss of each pair by its formula."""
    trainer = dpo(tmp_path, "llama", PlannedDPO, loss_type=[name], label_smoothing=0.1, max_length=most)
    cut = None if most > 100 else most
    wanted = losses_alone(moved(tiny.build("llama")), tiny.build("llama"), trainer.train_dataset, cut)[name]
    autopack.enable(trainer)
    of_steps = expected(trainer, wanted, 150, 1, 1)
    assert [loss for loss, *_ in steps(trainer)] == pytest.approx(of_steps, **CLOSE)
    assert np.std(of_steps) > 1e-3, "losses must differ"


def _lora() -> Any:
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


@pytest.mark.parametrize("given_by", ["trainer", "user"])
def test_peft_whose_reference_is_the_policy(given_by, tmp_path):
    def make() -> Any:
        model, extra = tiny.build("llama"), {"peft_config": _lora()}
        if given_by == "user":
            model, extra = peft.get_peft_model(model, _lora()), {}
        args = arguments(tmp_path)
        return PlannedDPO(model, args=args, train_dataset=pairs(), processing_class=tokenizer(), **extra)

    handle = compare(make)
    assert list(handle.handles) == ["model"]
    batches = len(make().get_train_dataloader())
    assert handle.handles["model"].tally.batches == 2 * batches, "the policy and its base"


def _reward(folder: Path, model_type: str, kind: Any = trl.RewardTrainer, **options: Any) -> Any:
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
    wanted = expected(trainer, np.array(losses), 150, 1, 1)
    assert [loss for loss, *_ in steps(trainer)] == pytest.approx(wanted, **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["orpo", "cpo"])
def test_trainers_that_make_pairs_of_two_tensors(name, tmp_path):
    module = pytest.importorskip(f"trl.experimental.{name}")
    trainer, config = (getattr(module, f"{name.upper()}{part}") for part in ("Trainer", "Config"))
    kind = type(name, (Planned, trainer), {})

    def make() -> Any:
        args = arguments(tmp_path, config)
        return kind(tiny.build("llama"), args=args, train_dataset=pairs(), processing_class=tokenizer())

    compare(make)


def test_evaluation(tmp_path):
    stock, enabled = (dpo(tmp_path, eval_dataset=pairs(7, seed=1), per_device_eval_batch_size=3) for _ in range(2))
    autopack.enable(enabled)
    autopack.weigh_pairs(enabled)
    wanted, found = stock.evaluate(), enabled.evaluate()
    names = [name for name in wanted if not re.search("runtime|per_second", name)]
    assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, **CLOSE)
