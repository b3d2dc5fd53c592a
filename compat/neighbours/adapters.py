"""PEFT's methods, a copy of the weights that follows them (EMA), where activations and parameters
are kept, and gradients of single samples (Opacus)."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch

from autopack import tiny
from compat.neighbours.measure import Scenario, perturb, wrapping

_TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


def _adapters() -> dict[str, Callable[[Any], Any]]:
    return {
        "LoRA": lambda peft: peft.LoraConfig(r=4, **_TARGETS),
        "DoRA": lambda peft: peft.LoraConfig(r=4, use_dora=True, **_TARGETS),
        "IA3": lambda peft: peft.IA3Config(feedforward_modules=[], **_TARGETS),
        # Its regularisation is added once per call, and documents alone are several calls.
        "AdaLoRA": lambda peft: peft.AdaLoraConfig(
            init_r=4, total_step=10, orth_reg_weight=1e-12, **_TARGETS
        ),
        "OFT": lambda peft: peft.OFTConfig(oft_block_size=4, **_TARGETS),
        "VeRA": lambda peft: peft.VeraConfig(r=4, **_TARGETS),
        "prompt tuning": lambda peft: peft.PromptTuningConfig(**_PROMPT),
        "prefix tuning": lambda peft: peft.PrefixTuningConfig(**_PROMPT),
    }


def _with_adapter(config: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(model: Any) -> Any:
        import peft

        return perturb(peft.get_peft_model(model, config(peft)))

    return apply


def copied(model: Any) -> Any:
    """An EMA as many trainers keep one: a deepcopy, whose parameters follow."""
    ema = copy.deepcopy(model)
    perturb(model)
    with torch.no_grad():
        for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
    return ema


def _folder(model: Any) -> str:
    """A folder that is there as long as the model."""
    folder = tempfile.mkdtemp()
    weakref.finalize(model, shutil.rmtree, folder)
    return folder


def _cpu_offload(model: Any) -> Any:
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _dispatched(kept: str, rest: str) -> Callable[[Any], Any]:
    def apply(model: Any) -> Any:
        import accelerate

        # The token embeddings of a tied head stay where the head is.
        where = {
            "model.embed_tokens": kept,
            "model.norm": kept,
            "model.rotary_emb": kept,
            "lm_head": kept,
        }
        where |= {f"model.layers.{number}": rest for number in range(len(model.model.layers))}
        return accelerate.dispatch_model(
            model, where, main_device="cpu", offload_dir=_folder(model), force_hooks=True
        )

    return apply


def scenarios() -> list[Scenario]:
    """All of them."""
    found = [
        Scenario("peft", name, wrapping(_with_adapter(config)))
        for name, config in _adapters().items()
    ]
    found += [
        Scenario("accelerate", "`cpu_offload`", wrapping(_cpu_offload), trains=False),
        Scenario(
            "accelerate",
            "`dispatch_model`, layers on disk",
            wrapping(_dispatched("cpu", "disk")),
            trains=False,
        ),
        Scenario(
            "accelerate", "`dispatch_model`, all on the CPU", wrapping(_dispatched("cpu", "cpu"))
        ),
        Scenario("torch", "EMA: a `deepcopy` that follows", wrapping(copied)),
    ]
    return [
        *found,
        Scenario(
            "torch",
            "activations offloaded: `autograd.graph.save_on_cpu`",
            wrapping(lambda model: model),
            around=torch.autograd.graph.save_on_cpu,
        ),
        Scenario(
            "torch",
            "activations offloaded, with gradient checkpointing",
            wrapping(_checkpointed),
            around=torch.autograd.graph.save_on_cpu,
        ),
        Scenario(
            "opacus",
            "`GradSampleModule`",
            wrapping(_per_sample, lambda: tiny.build("gpt_neox", attn_implementation="sdpa")),
            note=(
                "gradients of single samples are compared for padded batches; of a packed row "
                "the row is the sample"
            ),
        ),
    ]


def _per_sample(model: Any) -> Any:
    from opacus import GradSampleModule

    return GradSampleModule(model, loss_reduction="sum")


def _checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
