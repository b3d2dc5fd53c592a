"""TextBrewer: a transformers classifier distilled into a smaller one by its distillers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._drivers import loaded


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Distil, as the configuration of a run says."""
    import torch
    from textbrewer import DistillationConfig, GeneralDistiller, TrainingConfig
    from transformers import AutoModelForSequenceClassification

    attentions = any(
        each["feature"] == "attention" for each in told.get("intermediate_matches", ())
    )
    asked = {
        "output_hidden_states": True,
        "output_attentions": attentions,
        "attn_implementation": "eager",
    }
    teacher, student = (
        AutoModelForSequenceClassification.from_pretrained(folder / name, **asked)
        for name in ("teacher", "student")
    )

    def adaptor(batch: Any, found: Any) -> dict[str, Any]:
        given = {
            "logits": found.logits,
            "hidden": found.hidden_states,
            "attention": found.attentions,
        }
        return {**given, "inputs_mask": batch["attention_mask"], "losses": found.loss}

    distiller = GeneralDistiller(
        TrainingConfig(device="cpu", output_dir=str(output / "out"), ckpt_frequency=1),
        DistillationConfig(temperature=8, **told),
        teacher,
        student,
        adaptor,
        adaptor,
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    with distiller:
        distiller.train(optimizer, loaded(folder / "student", together=True), num_epochs=1)
