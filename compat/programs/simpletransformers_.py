"""Simple Transformers: its classes for each task with their defaults, which pad every text to the
longest allowed."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

from compat.programs._words import WORDS, text

_ARGS = {
    **dict.fromkeys(("use_multiprocessing", "use_multiprocessing_for_evaluation", "fp16"), False),
    **dict.fromkeys(("overwrite_output_dir", "no_save", "silent"), True),
    "manual_seed": 4,
    "learning_rate": 1e-3,
}
_ROWS = range(32)


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
    model.train_model(_data(told, output, random.Random(0)))


def _data(told: dict[str, Any], output: Path, draw: random.Random) -> Any:
    import pandas

    data, labels = told["data"], range(told.get("options", {}).get("num_labels", 1))
    if data == "lines":
        file = output / "texts.txt"
        file.write_text("\n".join(text(draw, 60) for _ in _ROWS) + "\n")
        return str(file)
    if data == "questions":
        return [_question(number, draw) for number in range(16)]
    rows: dict[str, tuple[list[str], Any]] = {
        "classes": (["text", "labels"], lambda: [text(draw, 60), draw.choice(labels)]),
        "pairs": (
            ["text_a", "text_b", "labels"],
            lambda: [text(draw, 40), text(draw, 40), draw.choice(labels)],
        ),
        "numbers": (["text", "labels"], lambda: [text(draw, 60), draw.random()]),
        "several": (
            ["text", "labels"],
            lambda: [text(draw, 60), [draw.randrange(2) for _ in labels]],
        ),
        "tasks": (
            ["prefix", "input_text", "target_text"],
            lambda: ["task", text(draw, 30), text(draw, 10)],
        ),
        "summaries": (["input_text", "target_text"], lambda: [text(draw, 60), text(draw, 20)]),
    }
    if data == "words":
        known = told["options"]["labels"]
        each = (draw.choices(WORDS, k=draw.randrange(3, 60)) for _ in _ROWS)
        listed = [
            [number, word, draw.choice(known)]
            for number, words in enumerate(each)
            for word in words
        ]
        return pandas.DataFrame(listed, columns=["sentence_id", "words", "labels"])
    columns, row = rows[data]
    return pandas.DataFrame([row() for _ in _ROWS], columns=columns)


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
