"""small-text: its classifiers with their defaults, inside a loop of active learning, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "small-text[transformers]==1.4.1"
    ENV/bin/pip install "transformers==4.57.6" && ENV/bin/pip install -e .

The tiny encoder has no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import text

NAME = "small-text"
PACKAGE = "small-text"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "classifier": {},
    "classifier, layers at their own rates": {"layerwise_gradient_decay": 0.975},
    "classifier, several labels": {"multi_label": True},
}
"""What each run says beside the defaults."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoder."""
    save_encoder(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which learns from some texts, asks for more, and learns from those too."""
    return driven("small_text_", run, folder, output)


def _train(run: str, folder: Path) -> None:
    import numpy as np
    from scipy.sparse import csr_matrix
    from small_text import (
        FineTuningArguments,
        PoolBasedActiveLearner,
        RandomSampling,
        TransformerBasedClassificationFactory,
        TransformerModelArguments,
        TransformersDataset,
    )
    from transformers import AutoTokenizer

    said, draw = dict(RUNS[run]), random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    texts = [text(draw, 60) for _ in range(48)]
    several = bool(said.get("multi_label"))
    classes = np.array([number % 2 for number in range(48)])
    labels = csr_matrix(np.stack([classes, 1 - classes, classes], axis=1)) if several else classes
    known = 3 if several else 2
    data = TransformersDataset.from_arrays(texts, labels, tokenizer, target_labels=np.arange(known), max_length=64)
    decay = said.pop("layerwise_gradient_decay", None)
    more = {} if decay is None else {"fine_tuning_arguments": FineTuningArguments(1e-3, decay)}
    factory = TransformerBasedClassificationFactory(
        TransformerModelArguments(str(folder / "bert")),
        known,
        kwargs={**more, **said, "num_epochs": 2, "device": "cpu"},
    )
    learner = PoolBasedActiveLearner(factory, RandomSampling(), data)
    first = np.arange(24)
    learner.initialize_data(first, labels[first])
    asked = learner.query(num_samples=12)
    learner.update(labels[asked])


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]))
