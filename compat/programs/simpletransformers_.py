"""Simple Transformers: its classes for each task with their defaults, which pad every text to the longest allowed.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "simpletransformers==0.70.8" && ENV/bin/pip install -e .

The tiny models have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import WORDS, save_model, text

NAME = "Simple Transformers"
PACKAGE = "simpletransformers"
STAND_INS = ()
_CPU = {"use_multiprocessing": False, "use_multiprocessing_for_evaluation": False, "fp16": False}
_ARGS = {**_CPU, "overwrite_output_dir": True, "no_save": True, "manual_seed": 4, "silent": True, "learning_rate": 1e-3}


def _settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {**_ARGS, "output_dir": str(folder / "out"), "cache_dir": str(folder / "cache"), **more}


def _classes(draw: random.Random, label: Callable[[], Any], pair: bool = False) -> Any:
    import pandas

    if pair:
        rows = [[text(draw, 40), text(draw, 40), label()] for _ in range(32)]
        return pandas.DataFrame(rows, columns=["text_a", "text_b", "labels"])
    return pandas.DataFrame([[text(draw, 60), label()] for _ in range(32)], columns=["text", "labels"])


def _classification(folder: Path, output: Path, pair: bool = False, **args: Any) -> None:
    from simpletransformers.classification import ClassificationModel

    draw = random.Random(0)
    regression = bool(args.get("regression"))
    labels = 1 if regression else 3
    model = ClassificationModel(
        "auto", str(folder / "bert"), num_labels=labels, use_cuda=False, args=_settings(output, **args)
    )
    model.train_model(_classes(draw, draw.random if regression else lambda: draw.randrange(3), pair))


def _multi_label(folder: Path, output: Path) -> None:
    from simpletransformers.classification import MultiLabelClassificationModel

    draw = random.Random(0)
    model = MultiLabelClassificationModel(
        "roberta", str(folder / "roberta"), num_labels=4, use_cuda=False, args=_settings(output)
    )
    model.train_model(_classes(draw, lambda: [draw.randrange(2) for _ in range(4)]))


def _ner(folder: Path, output: Path) -> None:
    import pandas
    from simpletransformers.ner import NERModel

    draw = random.Random(0)
    labels = ["O", "B-PER", "I-PER"]
    rows = [
        [number, word, draw.choice(labels)]
        for number in range(32)
        for word in draw.choices(WORDS, k=draw.randrange(3, 60))
    ]
    model = NERModel("auto", str(folder / "bert"), labels=labels, use_cuda=False, args=_settings(output))
    model.train_model(pandas.DataFrame(rows, columns=["sentence_id", "words", "labels"]))


def _t5(folder: Path, output: Path) -> None:
    import pandas
    from simpletransformers.t5 import T5Model

    draw = random.Random(0)
    rows = [["task", text(draw, 30), text(draw, 10)] for _ in range(32)]
    model = T5Model("byt5", str(folder / "byt5"), use_cuda=False, args=_settings(output))
    model.train_model(pandas.DataFrame(rows, columns=["prefix", "input_text", "target_text"]))


def _bart(folder: Path, output: Path) -> None:
    import pandas
    from simpletransformers.seq2seq import Seq2SeqModel

    draw = random.Random(0)
    rows = [[text(draw, 60), text(draw, 20)] for _ in range(32)]
    model = Seq2SeqModel(
        encoder_decoder_type="bart",
        encoder_decoder_name=str(folder / "bart"),
        use_cuda=False,
        args=_settings(output, use_multiprocessed_decoding=False),
    )
    model.train_model(pandas.DataFrame(rows, columns=["input_text", "target_text"]))


def _language_model(folder: Path, output: Path, model_type: str, **args: Any) -> None:
    from simpletransformers.language_modeling import LanguageModelingModel

    draw = random.Random(0)
    file = output / "texts.txt"
    file.write_text("\n".join(text(draw, 60) for _ in range(32)) + "\n")
    model = LanguageModelingModel(model_type, str(folder / model_type), use_cuda=False, args=_settings(output, **args))
    model.train_model(str(file))


def _questions(folder: Path, output: Path) -> None:
    from simpletransformers.question_answering import QuestionAnsweringModel

    draw = random.Random(0)
    rows = []
    for number in range(16):
        context = text(draw, 60)
        answer = context.split()[1]
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        asked = {"id": str(number), "is_impossible": False, "question": text(draw, 10), "answers": answers}
        rows.append({"context": context, "qas": [asked]})
    model = QuestionAnsweringModel("auto", str(folder / "bert"), use_cuda=False, args=_settings(output))
    model.train_model(rows)


RUNS: dict[str, Callable[[Path, Path], None]] = {
    "classification": _classification,
    "classification, pairs": lambda folder, output: _classification(folder, output, pair=True),
    "regression": lambda folder, output: _classification(folder, output, regression=True),
    "multi-label": _multi_label,
    "NER": _ner,
    "question answering": _questions,
    "ByT5": _t5,
    "BART": _bart,
    "language model": lambda folder, output: _language_model(folder, output, "bert"),
}
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write tiny models of the types that runs name."""
    from transformers import ByT5Tokenizer

    save_encoder(folder / "bert", auto="AutoModelForMaskedLM", max_position_embeddings=512)
    save_encoder(folder / "roberta", "roberta", "AutoModelForMaskedLM", max_position_embeddings=514)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    tokens = {"vocab_size": 384, "eos_token_id": 1, "decoder_start_token_id": 0}
    save_model(folder / "byt5", "t5", "AutoModelForSeq2SeqLM", **tokens, **sizes)
    for file in (folder / "byt5").glob("tokenizer*"):
        file.unlink()
    ByT5Tokenizer().save_pretrained(folder / "byt5")
    half = {"attention_heads": 4, "ffn_dim": 128, "layers": 2}
    halves = {f"{name}_{field}": value for name in ("encoder", "decoder") for field, value in half.items()}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    save_encoder(
        folder / "bart", "bart", "AutoModelForSeq2SeqLM", d_model=64, decoder_start_token_id=2, **halves, **none
    )


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes one of its models and trains it."""
    return driven("simpletransformers_", run, folder, output)


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        RUNS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
