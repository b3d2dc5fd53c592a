"""Pairs for tests of preference data: a tokenizer, trainers of TRL, and every pair alone as the
reference."""

import datasets
import numpy as np
import torch
import trl
from torch.nn.functional import logsigmoid

from autopack import tiny
from tests.packing.batches import WORDS, arguments, tokenizer

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
