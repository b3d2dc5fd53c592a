"""Opacus: a transformers classifier trained with differential privacy, whose steps need the
gradient of every row.

The noise is seeded. The loop is that of Opacus' tutorial on text classification.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._words import text


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Train the classifier by Opacus' engine."""
    import torch
    from opacus import PrivacyEngine
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    said, draw = dict(told), random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert").requires_grad_(
        False
    )
    everything = said.pop("all", False)
    trained = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
    for module in [model.bert.encoder, *trained] if everything else trained:
        module.requires_grad_(True)
    texts = tokenizer(
        [text(draw, 60) for _ in range(32)],
        padding="max_length",
        max_length=64,
        return_tensors="pt",
    )
    labels = torch.tensor([number % 2 for number in range(32)])
    data = torch.utils.data.TensorDataset(texts["input_ids"], texts["attention_mask"], labels)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    model.train()
    ghost = said.get("grad_sample_mode") == "ghost"
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.1,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(0),
        **({"criterion": torch.nn.CrossEntropyLoss()} if ghost else {}),
        **said,
    )
    model, optimizer, criterion, loader = (
        made if ghost else (*made[:2], torch.nn.CrossEntropyLoss(), made[2])
    )
    for ids, mask, wanted in loader:
        optimizer.zero_grad()
        criterion(model(input_ids=ids, attention_mask=mask).logits, wanted).backward()
        optimizer.step()
