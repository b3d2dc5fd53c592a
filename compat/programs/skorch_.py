"""skorch: a transformers classifier inside scikit-learn's pipeline, as skorch's documentation fine-tunes one.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "skorch==1.4.0" "transformers==5.16.1" accelerate
    ENV/bin/pip install -e .

The tiny encoders have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import text

NAME = "skorch"
PACKAGE = "skorch"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "BERT": {"name": "bert"},
    "RoBERTa": {"name": "roberta"},
    "BERT, accelerate": {"name": "bert", "accelerate": True},
    "BERT, gradient accumulation": {"name": "bert", "accumulate": True},
}
"""The encoder of each run, and which of skorch's ways it is trained in."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the classifiers."""
    auto = "AutoModelForSequenceClassification"
    save_encoder(folder / "bert", "bert", auto, num_labels=2, max_position_embeddings=512)
    save_encoder(folder / "roberta", "roberta", auto, num_labels=2, max_position_embeddings=514)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which fits a pipeline."""
    return driven("skorch_", run, folder, output)


def _net(said: dict[str, Any]) -> Any:
    """The class of the net."""
    from accelerate import Accelerator
    from skorch import NeuralNetClassifier
    from skorch.hf import AccelerateMixin

    class Accumulating(AccelerateMixin, NeuralNetClassifier):
        """As in skorch's documentation: accelerate does what gradient accumulation takes."""

        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            with self.accelerator.accumulate(self.module_):
                return super().train_step(batch, **fit_params)

    if said.get("accumulate"):
        return lambda *args, **more: Accumulating(*args, accelerator=Accelerator(gradient_accumulation_steps=2), **more)
    if said.get("accelerate"):
        kind = type("Accelerated", (AccelerateMixin, NeuralNetClassifier), {})
        return lambda *args, **more: kind(*args, accelerator=Accelerator(), **more)
    return NeuralNetClassifier


def _train(run: str, folder: Path) -> None:
    import numpy as np
    import torch
    from sklearn.pipeline import Pipeline
    from skorch.hf import HuggingfacePretrainedTokenizer
    from transformers import AutoModelForSequenceClassification

    class Classifier(torch.nn.Module):
        def __init__(self, name: str):
            super().__init__()
            self.model = AutoModelForSequenceClassification.from_pretrained(name)

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch).logits

    draw, name = random.Random(0), str(folder / RUNS[run]["name"])
    net = _net(RUNS[run])(
        Classifier,
        module__name=name,
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        max_epochs=1,
        criterion=torch.nn.CrossEntropyLoss,
        batch_size=8,
        iterator_train__shuffle=True,
        train_split=None,
        device=None if len(RUNS[run]) > 1 else "cpu",
    )
    texts = [text(draw, 60) for _ in range(32)]
    pipeline = Pipeline([("tokenizer", HuggingfacePretrainedTokenizer(name, max_length=96)), ("net", net)])
    pipeline.fit(texts, np.array([number % 2 for number in range(32)]))


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]))
