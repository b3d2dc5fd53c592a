"""What drivers of libraries share: models and tokenizers of encoders, and the numbers that a Trainer logged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compat.programs._words import save_model

ENCODER: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
"""BERT without dropout."""
_TIMES = re.compile(r"runtime|per_second|step_time|flos|epoch$|_mem_")
Run = Callable[[Path, Path], None]
"""One run: of the folder that was prepared, and the one it writes to."""


def save_encoder(folder: Path, auto: str = "AutoModel", model_type: str = "bert", **fields: Any) -> None:
    """Write a tiny encoder whose tokenizer makes `<s> text </s>`, or `<s> text </s> other </s>` of a pair."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    own = ENCODER if model_type == "bert" else {}
    save_model(folder, model_type, auto, **{"max_position_embeddings": 128, **own, **fields})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    pair = "<s> $A </s> $B:1 </s>:1"
    made = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = made
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(folder)


def write_steps(output: Path, steps: list[dict[str, float]]) -> None:
    """Write what a program logged, step by step."""
    (output / "steps.json").write_text(json.dumps(steps))


def write_logs(output: Path, logged: list[dict[str, Any]], but: tuple[str, ...] = ()) -> None:
    """Write all numbers of a Trainer's log, those of evaluations too, except times and names that hold one of `but`."""

    def kept(name: str, value: Any) -> bool:
        left_out = _TIMES.search(name) is not None or any(word in name for word in but)
        return isinstance(value, int | float) and not left_out

    write_steps(output, [{name: value for name, value in entry.items() if kept(name, value)} for entry in logged])
