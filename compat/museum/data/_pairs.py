"""TRL's trainer of preferences on a tiny Llama and a few pairs."""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset

from compat.museum.data import _trainer
from compat.programs._words import SPECIAL, WORDS, tokenizer_of


def trainer() -> Any:
    """Return a trainer of twelve pairs, two micro-batches of two in a step."""
    from trl import DPOConfig, DPOTrainer

    words = WORDS[: _trainer.VOCABULARY - len(SPECIAL)]
    texts = [
        " ".join(words[number % len(words)] for number in row[1:-1])
        for row in _trainer.documents(36)
    ]
    pairs = {"prompt": texts[:12], "chosen": texts[12:24], "rejected": texts[24:]}
    args = DPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    net, reference = _trainer.model(use_cache=False), _trainer.model(use_cache=False)
    data = Dataset.from_dict(pairs)
    return DPOTrainer(
        net, reference, args=args, train_dataset=data, processing_class=tokenizer_of(words)
    )
