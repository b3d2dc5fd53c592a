"""Opacus: a transformers classifier trained with differential privacy, whose steps need the gradient of every row.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "opacus==1.6.0" "transformers==5.16.1" datasets
    ENV/bin/pip install -e .

The tiny encoder has no dropout, so that steps can be compared, and the noise is seeded. The loop is that of Opacus'
tutorial on text classification.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import text

NAME = "Opacus"
PACKAGE = "opacus"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "the last layer and the head": {},
    "all layers": {"all": True},
    "all layers, functorch": {"all": True, "grad_sample_mode": "functorch"},
    "all layers, ghost clipping": {"all": True, "grad_sample_mode": "ghost"},
}
"""What each run says beside the defaults."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the classifier."""
    save_encoder(folder / "bert", "bert", "AutoModelForSequenceClassification", num_labels=2)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which trains the classifier by Opacus' engine."""
    return driven("opacus_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    import torch
    from opacus import PrivacyEngine
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    said, draw = dict(RUNS[run]), random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    everything = said.pop("all", False)
    for parameter in model.parameters():
        parameter.requires_grad = False
    trained = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
    for module in [model.bert.encoder, *trained] if everything else trained:
        module.requires_grad_(True)
    texts = tokenizer([text(draw, 60) for _ in range(32)], padding="max_length", max_length=64, return_tensors="pt")
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
    model, optimizer, criterion, loader = made if ghost else (*made[:2], torch.nn.CrossEntropyLoss(), made[2])
    for ids, mask, wanted in loader:
        optimizer.zero_grad()
        criterion(model(input_ids=ids, attention_mask=mask).logits, wanted).backward()
        optimizer.step()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
