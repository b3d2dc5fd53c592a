"""Lightning: modules of one's own around models of transformers, trained by `Trainer.fit`.

`from_pretrained` hands a model over in evaluation mode and Lightning leaves it so; a run says where
it calls `train()`. Models are tiny, without dropout. Losses are those that a module logs, gradient
norms those before clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps, adapted, batches
from compat.programs.transformers_trainer import model_of


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Fit a module of a task, as a run says, and give what it logged in every step."""
    import transformers

    told = dict(told)
    task, mode, method = told.pop("task"), told.pop("mode", None), told.pop("peft", None)
    validated, classes = told.pop("validated", False), 3 if task in ("classes", "head") else 0
    where = folder / ("bert" if classes else "llama")
    if task == "head":
        transformers.set_seed(0)
        model: Any = transformers.AutoModel.from_pretrained(where)
    else:
        model = model_of(task, where)
    if method is not None:
        model = adapted(model, method)
    if mode == "train":
        model.train()
    given = list(batches(transformers.AutoTokenizer.from_pretrained(where), classes))
    if task == "fabric":
        return _fabric(model, given)
    return _fit(task, model, given, given[:2] if validated else None, output, told)


def _loader(rows: list[Any]) -> Any:
    import torch

    return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def _fit(
    task: str,
    model: Any,
    given: list[Any],
    validated: list[Any] | None,
    output: Path,
    told: dict[str, Any],
) -> Steps:
    import lightning
    import torch

    steps: Steps = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.head = torch.nn.Linear(64, 3) if task == "head" else None
            self.automatic_optimization = task != "manual"

        def forward(self, batch: dict[str, Any]) -> Any:
            if self.head is None:
                return self.model(**batch).loss
            shown = batch["attention_mask"]
            states = self.model(
                input_ids=batch["input_ids"], attention_mask=shown
            ).last_hidden_state
            mean = (states * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)
            return torch.nn.functional.cross_entropy(self.head(mean), batch["labels"])

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            loss = self(batch)
            self.log("train_loss", loss)
            steps.append({"loss": float(loss)})
            if task == "manual":
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
            return loss

        def validation_step(self, batch: dict[str, Any], _: int) -> None:
            loss = self(batch)
            self.log("val_loss", loss, prog_bar=True)
            steps.append({"validation": float(loss)})

        def on_before_optimizer_step(self, _: Any) -> None:
            gradients = [each.grad for each in self.parameters() if each.grad is not None]
            steps.append({"grad_norm": float(torch.nn.utils.get_total_norm(gradients))})

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar"), False
    )
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=str(output), **quiet, **told
    )
    trainer.fit(Module(), _loader(given), None if validated is None else _loader(validated))
    return steps


def _fabric(model: Any, given: list[Any]) -> Steps:
    """A loop of one's own, whose model and optimizer Fabric sets up."""
    import lightning
    import torch

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    steps = []
    prepared: Any = fabric.setup_dataloaders(_loader(given))
    for batch in prepared:
        loss = wrapped(**batch).loss
        fabric.backward(loss)
        norm: Any = fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": float(loss), "grad_norm": float(norm)})
    return steps
