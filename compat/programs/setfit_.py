"""SetFit: its trainers with their defaults, contrastive pairs first and a head after them, on
random words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._words import rows_of


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make a model and a trainer of SetFit's, and train."""
    import sentence_transformers.losses as losses
    from datasets import Dataset
    from setfit import DistillationTrainer, SetFitModel, Trainer, TrainingArguments

    said, where = dict(told), str(folder / "bert")
    several = "multi_target_strategy" in said
    rows = rows_of(folder / ("several.jsonl" if several else "classes.jsonl"))
    end_to_end, loss, distilled = (
        said.pop(name, None) for name in ("end_to_end", "loss", "distilled")
    )
    head = {"head_params": {"out_features": 2}} if said.get("use_differentiable_head") else {}
    model = SetFitModel.from_pretrained(where, **said, **head)
    if end_to_end:
        model.unfreeze("head")
    arguments = TrainingArguments(
        output_dir=str(output / "out"),
        batch_size=8,
        num_epochs=1,
        max_steps=6,
        end_to_end=bool(end_to_end),
        report_to="none",
        save_strategy="no",
        show_progress_bar=False,
        **({} if loss is None else {"loss": getattr(losses, loss)}),
    )
    data = Dataset.from_list(rows)
    if distilled:
        teacher = SetFitModel.from_pretrained(where)
        teacher.fit([row["text"] for row in rows], [row["label"] for row in rows], num_epochs=1)
        DistillationTrainer(
            teacher_model=teacher, student_model=model, args=arguments, train_dataset=data
        ).train()
    else:
        Trainer(model=model, args=arguments, train_dataset=data).train()
