"""Shared code of tests of training: quiet trainers, their losses, adapters and checkpoints."""

import pytest
import torch

QUIET = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
"""Arguments of trainers that write nothing."""


def losses_of(trainer):
    """Return the losses that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_lora(model, targets=("q_proj", "v_proj"), **options):
    """Return the model with low-rank adapters, whose weights are random but always the same."""
    peft = pytest.importorskip("peft")
    options = {"r": 4, "init_lora_weights": False, **options}
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))


def checkpointed(model, reentrant=False):
    """Return the model in training mode with checkpointing, which is switched on in place.

    Its first layer gets inputs that require gradients.
    """
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model
