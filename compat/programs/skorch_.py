"""skorch: a transformers classifier inside scikit-learn's pipeline, as skorch's documentation
fine-tunes one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._words import text


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Fit a pipeline."""
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

    draw, name = random.Random(0), str(folder / told["name"])
    kind, own = _net(told)
    net = kind(
        Classifier,
        module__name=name,
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        max_epochs=1,
        criterion=torch.nn.CrossEntropyLoss,
        batch_size=8,
        iterator_train__shuffle=True,
        train_split=None,
        **own,
    )
    texts = [text(draw, 60) for _ in range(32)]
    pipeline = Pipeline(
        [("tokenizer", HuggingfacePretrainedTokenizer(name, max_length=96)), ("net", net)]
    )
    pipeline.fit(texts, np.array([number % 2 for number in range(32)]))


def _net(told: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the net, and its own arguments."""
    from accelerate import Accelerator
    from skorch import NeuralNetClassifier
    from skorch.hf import AccelerateMixin

    class Accelerated(AccelerateMixin, NeuralNetClassifier):
        """As in skorch's documentation: accelerate does what gradient accumulation takes."""

        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            with self.accelerator.accumulate(self.module_):
                return super().train_step(batch, **fit_params)

    if "accumulate" in told:
        accelerator = Accelerator(gradient_accumulation_steps=told["accumulate"])
        return Accelerated, {"accelerator": accelerator, "device": None}
    return NeuralNetClassifier, {"device": "cpu"}
