"""Trainers, per-sample gradients, and kernels from the hub."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from autopack import tiny
from compat.neighbours.measure import Call, Scenario, wrapping


def _per_sample(model: Any) -> Any:
    from opacus import GradSampleModule

    return GradSampleModule(model, loss_reduction="sum")


def _opacus_model() -> Any:
    return tiny.build("gpt_neox", attn_implementation="sdpa")


def _fit(model: Any, calls: list[Call]) -> float:
    """One step of Lightning's Trainer on the calls, at a learning rate of 0."""
    import lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[Call], _: int) -> torch.Tensor:
            loss = torch.stack([self.model(**call).loss for call in batch]).sum()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def optimizer_zero_grad(self, *_: Any) -> None:
            """Gradients are left for the comparison."""

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader([calls], batch_size=None))  # type: ignore[arg-type]
    return losses[0]


class _Norm(torch.nn.Module):
    """A layer as the hub has them for RMSNorm: no state of its own, and the forward's signature."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Root mean square over the last dimension, by torch's own function."""
        shape, eps = hidden_states.shape[-1:], self.variance_epsilon
        return torch.nn.functional.rms_norm(hidden_states, shape, self.weight, eps)


class _Repository:
    """A repository of the hub's that needs no network."""

    layer_name = "RMSNorm"

    def load(self) -> type[torch.nn.Module]:
        """The layer."""
        return _Norm


@contextlib.contextmanager
def _replaceable() -> Iterator[None]:
    """Llama's norm as a layer that `kernelize` may replace, as it is where transformers accepts the
    `kernels`."""
    from kernels import replace_kernel_forward_from_hub
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    given = dict(vars(LlamaRMSNorm))
    replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
    try:
        yield
    finally:
        for name in vars(LlamaRMSNorm).keys() - given.keys():
            delattr(LlamaRMSNorm, name)


def _kernelized(model: Any) -> Any:
    from kernels import Mode, kernelize, use_kernel_mapping

    forward = model.model.norm.forward.__func__
    with use_kernel_mapping(
        {"RMSNorm": {"cpu": {Mode.TRAINING: _Repository()}}}, inherit_mapping=False
    ):
        kernelize(model, mode=Mode.TRAINING, device="cpu")
    if model.model.norm.forward.__func__ is forward:
        raise RuntimeError("kernelize replaced nothing")
    return model


def scenarios() -> list[Scenario]:
    """All of them."""
    return [
        Scenario(
            "opacus",
            "`GradSampleModule`",
            wrapping(_per_sample, _opacus_model),
            note=(
                "gradients of single samples are compared for padded batches; of a packed row "
                "the row is the sample"
            ),
        ),
        Scenario("lightning", "`Trainer.fit`", wrapping(lambda model: model), train=_fit),
        Scenario(
            "kernels",
            "`kernelize(model)`",
            wrapping(_kernelized),
            around=_replaceable,
            note="without a network: torch code stands in for a layer of the hub",
        ),
    ]
