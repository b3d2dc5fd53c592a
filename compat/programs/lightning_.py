"""Lightning: modules of one's own around models of transformers, trained by `Trainer.fit`.

`from_pretrained` hands a model over in evaluation mode and Lightning leaves it so; a run says where
it calls `train()`. Models are tiny, without dropout. Losses are those that a module logs, gradient
norms those before clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch

from compat.programs._drivers import Steps
from compat.programs.torch_loop import adamw
from compat.programs.transformers_trainer import loaded


class Module(lightning.LightningModule):
    """A model with its own loss; `steps` is what was logged."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.steps: Steps = []

    def _loss(self, name: str, batch: dict[str, Any]) -> Any:
        loss = self.model(**batch).loss
        self.log(name, loss)
        self.steps.append({name: float(loss)})
        return loss

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        return self._loss("loss", batch)

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self._loss("validation", batch)

    def on_before_optimizer_step(self, _: Any) -> None:
        gradients = [each.grad for each in self.parameters() if each.grad is not None]
        self.steps.append({"grad_norm": float(torch.nn.utils.get_total_norm(gradients))})

    def configure_optimizers(self) -> Any:
        return adamw(self)


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Fit a module of a task, as a run says, and give what it logged in every step."""
    told = dict(told)
    task, trains, validated = (
        told.pop("task"),
        told.pop("train", False),
        told.pop("validated", False),
    )
    model, batches = loaded(task, folder / ("bert" if task == "classes" else "llama"))
    module = Module(model.train(trains))
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar"), False
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=str(output), **quiet, **told
    )
    trainer.fit(module, batches, batches if validated else None)
    return module.steps
