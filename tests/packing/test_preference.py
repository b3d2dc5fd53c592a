"""Pairs in trainers of TRL: every step is that of stock, and of every pair alone; and what is
refused in them."""

import re
from pathlib import Path

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
from autopack.runtime.padding_read import LOOKS
from tests.engine import in_rows
from tests.packing.batches import WORDS, arguments, logged, tokenizer
from tests.support.refusals import refused

CAPACITY = 150
CLOSE = {"rel": 1e-5, "abs": 1e-5}
"""Rounding of float32: log-probabilities summed over a sequence are of order 100, with seven digits
each."""
DOCS = Path(autopack.__file__).parents[1] / "docs" / "packing.md"
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


def dpo(folder, model_type="llama", kind=trl.DPOTrainer, **options):
    """A trainer with a reference of its own."""
    given = {
        name: options.pop(name)
        for name in ("train_dataset", "eval_dataset", "data_collator")
        if name in options
    }
    given = {"train_dataset": pairs(), **given}
    policy, reference = moved(tiny.build(model_type)), tiny.build(model_type)
    options = {"per_device_train_batch_size": 4, **options}
    return kind(
        policy,
        reference,
        args=arguments(folder, trl.DPOConfig, **options),
        processing_class=tokenizer(),
        **given,
    )


def steps(trainer):
    """Loss, metrics and gradients of every batch of an epoch; parameters stay as they are."""
    found = []
    trainer.model.train()
    for batch in trainer.get_train_dataloader():
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        kept = getattr(trainer, "_metrics", {"train": {}})["train"]
        gradients = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
        found.append((loss.item(), {name: values[-1] for name, values in kept.items()}, gradients))
        kept.clear()
    return found


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["exo_pair", "aot", "sft"], "label_smoothing": 0.1},
        {"use_weighting": True},
        {"max_length": 12, "truncation_mode": "keep_end"},
        {"precompute_ref_log_probs": True, "gradient_checkpointing": False},
    ],
)
def test_options_of_dpo(options, tmp_path):
    compare(lambda: dpo(tmp_path, "llama", PlannedDPO, **options))


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
