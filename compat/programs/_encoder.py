"""Tiny encoders whose tokenizer frames a text as BERT's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.programs._words import save_model

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def save_encoder(folder: Path, model_type: str = "bert", auto: str = "AutoModel", **fields: Any) -> None:
    """A tiny model without dropout and its tokenizer: `<s> text </s>`, and `<s> one </s> other </s>`."""
    from tokenizers import Tokenizer, processors

    save_model(folder, model_type, auto, **{**NO_DROPOUT, **fields})
    file = str(folder / "tokenizer.json")
    made = Tokenizer.from_file(file)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.save(file)
