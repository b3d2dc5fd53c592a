"""SetFit: its trainers with their defaults, contrastive pairs first and a head after them, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "setfit==1.2.0" "transformers==5.16.1"
    ENV/bin/pip install -e .

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

NAME = "SetFit"
PACKAGE = "setfit"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "logistic head": {},
    "differentiable head": {"use_differentiable_head": True},
    "differentiable head, end to end": {"use_differentiable_head": True, "end_to_end": True},
    "triplet loss": {"loss": "BatchHardTripletLoss"},
    "several labels": {"multi_target_strategy": "one-vs-rest"},
    "distillation": {},
}
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoder."""
    save_encoder(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes a model and a trainer of SetFit's."""
    return driven("setfit_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    import sentence_transformers.losses as losses
    from datasets import Dataset
    from setfit import DistillationTrainer, SetFitModel, Trainer, TrainingArguments

    said, draw = dict(RUNS[run]), random.Random(0)
    several = "multi_target_strategy" in said
    rows = [
        {"text": text(draw, 60), "label": [draw.randrange(2) for _ in range(3)] if several else number % 2}
        for number in range(16)
    ]
    end_to_end, loss = said.pop("end_to_end", False), said.pop("loss", None)
    head = {"head_params": {"out_features": 2}} if said.get("use_differentiable_head") else {}
    model = SetFitModel.from_pretrained(str(folder / "bert"), **said, **head)
    if end_to_end:
        model.unfreeze("head")
    arguments = TrainingArguments(
        output_dir=str(output / "out"),
        batch_size=8,
        num_epochs=1,
        max_steps=6,
        end_to_end=end_to_end,
        report_to="none",
        save_strategy="no",
        show_progress_bar=False,
        **({} if loss is None else {"loss": getattr(losses, loss)}),
    )
    more: dict[str, Any] = {"model": model, "args": arguments, "train_dataset": Dataset.from_list(rows)}
    if run == "distillation":
        teacher = SetFitModel.from_pretrained(str(folder / "bert"))
        teacher.fit([row["text"] for row in rows], [row["label"] for row in rows], num_epochs=1)
        more = {"teacher_model": teacher, "student_model": model, **more}
        del more["model"]
        DistillationTrainer(**more).train()
    else:
        Trainer(**more).train()


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
