"""small-text: its classifiers with their defaults, inside a loop of active learning, on random
words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._words import text


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Learn from some texts, ask for more, and learn from those too."""
    import numpy as np
    import small_text
    from scipy.sparse import csr_matrix
    from transformers import AutoTokenizer

    said, draw = dict(told), random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    texts = [text(draw, 60) for _ in range(48)]
    several = bool(said.get("multi_label"))
    classes = np.array([number % 2 for number in range(48)])
    labels = csr_matrix(np.stack([classes, 1 - classes, classes], axis=1)) if several else classes
    known = 3 if several else 2
    data = small_text.TransformersDataset.from_arrays(
        texts, labels, tokenizer, target_labels=np.arange(known), max_length=64
    )
    decay = said.pop("layerwise_gradient_decay", None)
    more = (
        {}
        if decay is None
        else {"fine_tuning_arguments": small_text.FineTuningArguments(1e-3, decay)}
    )
    factory = small_text.TransformerBasedClassificationFactory(
        small_text.TransformerModelArguments(str(folder / "bert")),
        known,
        kwargs={**more, **said, "num_epochs": 2, "device": "cpu"},
    )
    learner = small_text.PoolBasedActiveLearner(factory, small_text.RandomSampling(), data)
    first = np.arange(24)
    learner.initialize_data(first, labels[first])
    learner.update(labels[learner.query(num_samples=12)])
