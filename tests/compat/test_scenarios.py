"""What people do with a model, in every release: a trainer, generation, checkpointing, the demo,
taking it back."""

import copy

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.demo import ENABLED, DemoSettings, compare
from tests.integration.test_trainer_logs import trainer as trainer_of


class Trainer(transformers.Trainer):
    """A trainer that keeps the losses of its steps as they are: those that it logs are rounded."""

    def training_step(self, *args, **kwargs):
        """The step of transformers, whatever its arguments are in this release."""
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


def losses(model, directory, enabled, **options):
    """The losses of every step of a `transformers.Trainer` on padded batches."""
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = trainer_of(directory, None, model, Trainer, **batches, **options)
    if enabled:
        autopack.enable(trainer)
    trainer.train()
    return trainer.losses


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_trainer_with_padded_batches(stock, checkpointing, tmp_path):
    """A script that pads trains as it did: every loss is stock's, and no padding is computed."""
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    options = options if checkpointing else {}
    model = copy.deepcopy(stock)
    wanted = losses(stock, tmp_path, False, **options)
    found = losses(model, tmp_path, True, **options)
    assert len(wanted) == 4
    assert found == pytest.approx(wanted, rel=1e-5)
    tally = autopack.enable(model).tally
    assert (tally.batches, tally.left) == (4, {}), str(tally)


def test_generate(stock):
    """An enabled model generates the tokens of stock, from one prompt and from prompts padded on
    the left."""
    model = copy.deepcopy(stock)
    autopack.enable(model)
    prompts = tiny.tokens(stock.config, 2, 9)
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0
    for arguments in ({"input_ids": prompts[:1]}, {"input_ids": prompts, "attention_mask": mask}):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            wanted, found = (each.generate(**arguments, **options) for each in (stock, model))
        assert torch.equal(found, wanted)


@pytest.mark.exhaustive
def test_demo():
    """The demo: packed rows with autopack have the losses of padded training."""
    result = compare(DemoSettings(steps=3, batch_size=6, longest=96))
    assert result.same(ENABLED)
