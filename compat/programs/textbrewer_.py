"""TextBrewer: a transformers classifier distilled into a smaller one by its distillers.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "transformers==4.57.6" tensorboard
    ENV/bin/pip install --no-deps "textbrewer==0.2.1.post1" && ENV/bin/pip install -e .

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

NAME = "TextBrewer"
PACKAGE = "textbrewer"
STAND_INS = ()
_HIDDEN = {"layer_T": 2, "layer_S": 1, "feature": "hidden", "loss": "hidden_mse", "weight": 1}
_ATTENTION = {"layer_T": 1, "layer_S": 0, "feature": "attention", "loss": "attention_mse", "weight": 1}
RUNS: dict[str, dict[str, Any]] = {
    "logits": {},
    "logits and labels": {"hard_label_weight": 1},
    "hidden states": {"intermediate_matches": [_HIDDEN]},
    "attention": {"intermediate_matches": [_ATTENTION]},
}
"""What the configuration of each distiller says."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the teacher and the student."""
    for name, layers in (("teacher", 2), ("student", 1)):
        more = {"num_hidden_layers": layers, "num_labels": 2, "attn_implementation": "eager"}
        save_encoder(folder / name, "bert", "AutoModelForSequenceClassification", **more)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which distils."""
    return driven("textbrewer_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    import torch
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    draw = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    rows: Any = [(text(draw, 60), number % 2) for number in range(32)]

    def collated(batch: list[tuple[str, int]]) -> dict[str, Any]:
        found = tokenizer([one for one, _ in batch], padding=True, return_tensors="pt", return_token_type_ids=False)
        return {**found, "labels": torch.tensor([label for _, label in batch])}

    def adaptor(batch: Any, found: Any) -> dict[str, Any]:
        told = {"logits": found.logits, "hidden": found.hidden_states, "attention": found.attentions}
        return {**told, "inputs_mask": batch["attention_mask"], "losses": found.loss}

    loader: Any = torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=collated)
    asked = {"output_hidden_states": True, "output_attentions": run == "attention", "attn_implementation": "eager"}
    teacher, student = (
        AutoModelForSequenceClassification.from_pretrained(folder / name, **asked) for name in ("teacher", "student")
    )
    distiller = GeneralDistiller(
        TrainingConfig(device="cpu", output_dir=str(output / "out"), ckpt_frequency=1),
        DistillationConfig(temperature=8, **RUNS[run]),
        teacher,
        student,
        adaptor,
        adaptor,
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    with distiller:
        distiller.train(optimizer, loader, num_epochs=1)


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
