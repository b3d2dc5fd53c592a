"""Simple Transformers: its classes for each task with their defaults, which pad every text to the
longest allowed."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

from compat.programs._words import WORDS, rows_of, text

_ARGS = {
    **dict.fromkeys(("use_multiprocessing", "use_multiprocessing_for_evaluation", "fp16"), False),
    **dict.fromkeys(("overwrite_output_dir", "no_save", "silent"), True),
    "manual_seed": 4,
    "learning_rate": 1e-3,
}


def prepare(folder: Path) -> None:
    """Give ByT5 its own tokenizer."""
    from transformers import ByT5Tokenizer

    for file in (folder / "byt5").glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(folder / "byt5")


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make the model of a task and train it."""
    settings = {
        **_ARGS,
        "output_dir": str(output / "out"),
        "cache_dir": str(output / "cache"),
        **told.get("args", {}),
    }
    module = importlib.import_module(f"simpletransformers.{told['module']}")
    where, kind, options = (
        str(folder / told["model"]),
        told.get("kind", "auto"),
        told.get("options", {}),
    )
    if told["class"] == "Seq2SeqModel":
        places = {"encoder_decoder_type": kind, "encoder_decoder_name": where}
        model = module.Seq2SeqModel(**places, use_cuda=False, args=settings)
    else:
        model = getattr(module, told["class"])(
            kind, where, use_cuda=False, args=settings, **options
        )
    model.train_model(_data(told, folder))


def _data(told: dict[str, Any], folder: Path) -> Any:
    import pandas

    data, draw = told["data"], random.Random(0)
    if data == "lines":
        return str(folder / "lines.txt")
    if data == "questions":
        return [_question(number, draw) for number in range(16)]
    if data != "words":
        return pandas.DataFrame(rows_of(folder / f"{data}.jsonl"))
    known = told["options"]["labels"]
    each = (draw.choices(WORDS, k=draw.randrange(3, 60)) for _ in range(32))
    listed = [
        [number, word, draw.choice(known)] for number, words in enumerate(each) for word in words
    ]
    return pandas.DataFrame(listed, columns=["sentence_id", "words", "labels"])


def _question(number: int, draw: random.Random) -> dict[str, Any]:
    context = text(draw, 60)
    answer = context.split()[1]
    answers = [{"text": answer, "answer_start": context.index(answer)}]
    asked = {
        "id": str(number),
        "is_impossible": False,
        "question": text(draw, 10),
        "answers": answers,
    }
    return {"context": context, "qas": [asked]}
