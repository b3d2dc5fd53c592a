"""Ignite: a transformers model trained by its engines, as Ignite's example for transformers
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import loaded


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Run an engine of one epoch."""
    import torch
    from ignite.engine import Engine, create_supervised_trainer
    from transformers import AutoModelForCausalLM

    causal = told["name"] == "llama"
    model: Any = (
        AutoModelForCausalLM.from_pretrained(folder / "llama") if causal else _classifier(folder)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(engine: Any, batch: Any) -> float:
        given, labels = batch
        model.train()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(given), labels.float()[:, None]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def labelled(
        batch: Any, device: Any = None, non_blocking: bool = False
    ) -> tuple[dict[str, Any], Any]:
        labels = batch[0]["input_ids"].masked_fill(batch[0]["attention_mask"] == 0, -100)
        return {**batch[0], "labels": labels}, labels

    if causal:
        trainer = create_supervised_trainer(
            model,
            optimizer,
            lambda found, wanted: found.loss,
            prepare_batch=labelled,
            model_fn=lambda module, inputs: module(**inputs),
            gradient_accumulation_steps=told.get("accumulate", 1),
        )
    else:
        trainer = Engine(step)
    trainer.run(loaded(folder / told["name"], shuffle=True), max_epochs=1)


def _classifier(folder: Path) -> Any:
    """The example's: an encoder, and a layer on what its pooler gives."""
    import torch
    from transformers import AutoModel

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = AutoModel.from_pretrained(folder / "bert")
            self.classifier = torch.nn.Linear(self.transformer.config.hidden_size, 1)

        def forward(self, inputs: dict[str, Any]) -> Any:
            return self.classifier(self.transformer(**inputs, return_dict=True)["pooler_output"])

    return Classifier()
