"""Ignite: a transformers model trained by its engines, as Ignite's example for transformers does.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "pytorch-ignite==0.5.5" "transformers==5.16.1"
    ENV/bin/pip install -e .

The tiny models have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import save_model, text

NAME = "Ignite"
PACKAGE = "pytorch-ignite"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "BERT, classifier": {"name": "bert"},
    "Llama": {"name": "llama"},
    "Llama, gradient accumulation": {"name": "llama", "accumulate": 2},
}
"""The model of each run, and how it is trained."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the models."""
    save_encoder(folder / "bert")
    save_model(folder / "llama", "llama")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which runs an engine."""
    return driven("ignite_", run, folder, output)


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


def _train(run: str, folder: Path) -> None:
    import torch
    from ignite.engine import Engine, create_supervised_trainer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said, draw = RUNS[run], random.Random(0)
    causal = said["name"] == "llama"
    tokenizer = AutoTokenizer.from_pretrained(folder / said["name"])
    rows: Any = [(text(draw, 60), [float(number % 2)]) for number in range(32)]

    def collated(batch: list[tuple[str, list[float]]]) -> tuple[dict[str, Any], Any]:
        found = tokenizer([one for one, _ in batch], padding=True, return_tensors="pt", return_token_type_ids=False)
        return dict(found), torch.tensor([label for _, label in batch])

    loader: Any = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collated)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "llama") if causal else _classifier(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def criterion(found: Any, wanted: Any) -> Any:
        return torch.nn.functional.binary_cross_entropy_with_logits(found, wanted)

    def step(engine: Any, batch: tuple[dict[str, Any], Any]) -> float:
        model.train()
        loss = criterion(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def stock_loss(found: Any, wanted: Any) -> Any:
        return found.loss

    def labelled(batch: Any, device: Any = None, non_blocking: bool = False) -> tuple[dict[str, Any], Any]:
        labels = batch[0]["input_ids"].masked_fill(batch[0]["attention_mask"] == 0, -100)
        return {**batch[0], "labels": labels}, labels

    if causal:
        trainer = create_supervised_trainer(
            model,
            optimizer,
            stock_loss,
            prepare_batch=labelled,
            model_fn=lambda module, inputs: module(**inputs),
            gradient_accumulation_steps=said.get("accumulate", 1),
        )
    else:
        trainer = Engine(step)
    trainer.run(loader, max_epochs=1)


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]))
