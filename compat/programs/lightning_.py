"""Lightning: modules of one's own around models of transformers, trained by `Trainer.fit`.

`from_pretrained` hands a model over in evaluation mode and Lightning leaves it so; a run says where it calls `train()`.
Models are tiny, without dropout. Losses are those that a module logs, gradient norms those before clipping.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import save_encoder, write_steps
from compat.programs._words import save_model, text

NAME = "Lightning"
PACKAGE = "lightning"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "causal LM, training mode": {"task": "causal", "mode": "train"},
    "causal LM, mode as loaded": {"task": "causal"},
    "accumulation, clipping, validation": {
        "task": "causal",
        "mode": "train",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "validated": True,
    },
    "classification, mode as loaded, validation": {"task": "classes", "validated": True},
    "backbone in evaluation mode, own head": {"task": "head"},
    "LoRA": {"task": "causal", "mode": "train", "peft": True},
    "manual optimization": {"task": "manual", "mode": "train"},
    "Fabric": {"task": "fabric", "mode": "train"},
}
"""The task of each run, and what it says to Lightning's Trainer."""
APART: frozenset[str] = frozenset()
_BATCHES, _ROWS = 9, 4


def prepare(folder: Path) -> None:
    """Write a tiny Llama, and a tiny BERT with a head and without."""
    save_model(folder / "llama", "llama")
    save_encoder(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script."""
    return ["-m", "compat.programs.lightning_", run, str(folder), str(output)]


def train(run: str, folder: Path, output: Path) -> None:
    """Fit one of the runs, and write what its module logged in every step."""
    import transformers

    told = dict(RUNS[run])
    task, mode, adapted = told.pop("task"), told.pop("mode", None), told.pop("peft", False)
    validated = told.pop("validated", False)
    transformers.set_seed(0)
    if task in ("classes", "head"):
        where = folder / "bert"
        auto = transformers.AutoModelForSequenceClassification if task == "classes" else transformers.AutoModel
        options = {"num_labels": 3} if task == "classes" else {}
        model: Any = auto.from_pretrained(where, **options)
    else:
        where = folder / "llama"
        model = transformers.AutoModelForCausalLM.from_pretrained(where)
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    if mode == "train":
        model.train()
    batches = _batches(transformers.AutoTokenizer.from_pretrained(where), task in ("classes", "head"))
    if task == "fabric":
        steps = _fabric(model, batches)
    else:
        steps = _fit(task, model, batches, batches[:2] if validated else None, output, told)
    write_steps(output, steps)


def _batches(tokenizer: Any, classes: bool) -> Any:
    import torch

    draw, made = random.Random(0), []
    for _ in range(_BATCHES):
        batch = dict(tokenizer([text(draw, 40) for _ in range(_ROWS)], padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        drawn = torch.tensor([draw.randrange(3) for _ in range(_ROWS)])
        made.append({**batch, "labels": drawn if classes else labels})
    return made


def _fit(
    task: str, model: Any, batches: list[Any], validated: list[Any] | None, output: Path, told: dict[str, Any]
) -> list[dict[str, float]]:
    import lightning
    import torch

    steps: list[dict[str, float]] = []

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
            states = self.model(input_ids=batch["input_ids"], attention_mask=shown).last_hidden_state
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

    def loader(rows: list[Any]) -> Any:
        return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(output),
        **told,
    )
    trainer.fit(Module(), loader(batches), None if validated is None else loader(validated))
    return steps


def _fabric(model: Any, batches: Any) -> list[dict[str, float]]:
    """A loop of one's own, whose model and optimizer Fabric sets up."""
    import lightning
    import torch

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    steps = []
    loader: Any = fabric.setup_dataloaders(torch.utils.data.DataLoader(batches, batch_size=None))
    for batch in loader:
        loss = wrapped(**batch).loss
        fabric.backward(loss)
        norm: Any = fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"loss": float(loss), "grad_norm": float(norm)})
    return steps


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
