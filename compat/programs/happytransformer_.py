"""Happy Transformer: its classes for each task with their defaults, which pad the whole data set to its longest text.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "happytransformer==3.0.1" "transformers==4.57.6"
    ENV/bin/pip install -e .

The tiny models have no dropout, so that steps can be compared.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import WORDS, save_model, text

NAME = "Happy Transformer"
PACKAGE = "happytransformer"
STAND_INS = ()
_LONGEST = {"max_input_length": 128, "max_output_length": 64}
RUNS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "text classification": ("HappyTextClassification", "TCTrainArgs", "bert", {}),
    "text classification, batches of 8": ("HappyTextClassification", "TCTrainArgs", "bert", {"batch_size": 8}),
    "question answering": ("HappyQuestionAnswering", "QATrainArgs", "bert", {"batch_size": 8}),
    "word prediction": ("HappyWordPrediction", "WPTrainArgs", "bert", {"batch_size": 8, "line_by_line": True}),
    "generation": ("HappyGeneration", "GENTrainArgs", "gpt2", {"batch_size": 8}),
    "text to text": ("HappyTextToText", "TTTrainArgs", "t5", {"batch_size": 8, **_LONGEST}),
}
"""The class of each run, that of its arguments, its model, and what it says beside the defaults."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write tiny models, and a file of texts for each task."""
    save_encoder(folder / "bert", "bert", "AutoModelForMaskedLM", max_position_embeddings=512)
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    save_model(folder / "gpt2", "gpt2", n_embd=64, n_layer=2, n_head=4, **none)
    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    save_model(folder / "t5", "t5", "AutoModelForSeq2SeqLM", decoder_start_token_id=0, **sizes)
    draw = random.Random(0)

    def write(name: str, columns: list[str], rows: Iterable[list[Any]]) -> None:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    write("HappyTextClassification.csv", ["text", "label"], ([text(draw, 60), n % 2] for n in range(32)))
    contexts = [text(draw, 60) for _ in range(32)]
    asked = ([one, f"{WORDS[1]} {WORDS[2]}", one.split()[1], one.index(one.split()[1])] for one in contexts)
    write("HappyQuestionAnswering.csv", ["context", "question", "answer_text", "answer_start"], asked)
    write("HappyTextToText.csv", ["input", "target"], ([text(draw, 60), text(draw, 20)] for _ in range(32)))
    lines = "\n".join(text(draw, 60) for _ in range(32)) + "\n"
    for name in ("HappyWordPrediction.txt", "HappyGeneration.txt"):
        (folder / name).write_text(lines)


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes one of its models and trains it on a file."""
    return driven("happytransformer_", run, folder, output)


def _train(run: str, folder: Path, output: Path) -> None:
    import happytransformer

    kind, arguments, name, said = RUNS[run]
    types = {"bert": "BERT", "gpt2": "GPT2", "t5": "T5"}
    model = getattr(happytransformer, kind)(types[name], str(folder / name))
    given = getattr(happytransformer, arguments)(output_dir=str(output / "out"), learning_rate=1e-3, **said)
    model.train(str(next(folder.glob(f"{kind}.*"))), args=given)


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
