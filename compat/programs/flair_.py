"""Flair: `fine_tune` with its defaults, for taggers and classifiers over a transformer, on random words.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "flair==0.15.1" "transformers==4.57.6"
    ENV/bin/pip install -e .

The tiny encoder has no dropout, so that steps can be compared; Flair's own, of words and of what follows the encoder,
is as ever, and draws the same numbers either way.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import WORDS, text

NAME = "Flair"
PACKAGE = "flair"
STAND_INS = ()
RUNS: dict[str, dict[str, Any]] = {
    "sequence tagger": {},
    "sequence tagger, with context": {"use_context": True},
    "sequence tagger, CRF and LSTM": {"use_crf": True, "use_rnn": True},
    "text classifier": {},
    "text classifier, mean pooling": {"cls_pooling": "mean"},
    "text regressor": {},
    "text pairs": {},
}
"""What each run says beside the defaults."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoder."""
    save_encoder(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes a model of Flair's and fine-tunes it."""
    return driven("flair_", run, folder, output)


def _tagger(folder: Path, draw: random.Random, said: dict[str, Any]) -> tuple[Any, list[Any], str]:
    from flair.data import Dictionary, Sentence
    from flair.embeddings import TransformerWordEmbeddings
    from flair.models import SequenceTagger

    sentences = []
    for _ in range(24):
        sentence = Sentence(draw.choices(WORDS, k=draw.randrange(3, 60)))
        for token in sentence[:3]:
            token.add_label("ner", draw.choice(["PER", "LOC"]))
        sentences.append(sentence)
    context = {"use_context": said.pop("use_context", False)}
    embeddings = TransformerWordEmbeddings(str(folder / "bert"), layers="-1", fine_tune=True, **context)
    tags = Dictionary(add_unk=False)
    for tag in ("O", "PER", "LOC"):
        tags.add_item(tag)
    settings = {"use_crf": False, "use_rnn": False, "reproject_embeddings": False, **said}
    return SequenceTagger(embeddings, tags, "ner", tag_format="BIO", **settings), sentences, "ner"


def _classifier(folder: Path, draw: random.Random, said: dict[str, Any], run: str) -> tuple[Any, list[Any], str]:
    from flair.data import Dictionary, Sentence, TextPair
    from flair.embeddings import TransformerDocumentEmbeddings
    from flair.models import TextClassifier, TextPairClassifier, TextRegressor

    embeddings = TransformerDocumentEmbeddings(str(folder / "bert"), fine_tune=True, **said)
    texts: list[Any] = [Sentence(text(draw, 60)) for _ in range(24)]
    if run == "text regressor":
        for sentence in texts:
            sentence.add_label("score", str(draw.random()))
        return TextRegressor(embeddings, label_name="score"), texts, "score"
    if run == "text pairs":
        texts = [TextPair(one, Sentence(text(draw, 30))) for one in texts]
    for each in texts:
        each.add_label("class", draw.choice(["good", "bad"]))
    labels = Dictionary(add_unk=False)
    for label in ("good", "bad"):
        labels.add_item(label)
    kind = TextPairClassifier if run == "text pairs" else TextClassifier
    return kind(embeddings, label_type="class", label_dictionary=labels), texts, "class"


def _train(run: str, folder: Path, output: Path) -> None:
    import flair
    from flair.data import Corpus
    from flair.datasets import FlairDatapointDataset
    from flair.trainers import ModelTrainer

    flair.set_seed(0)
    draw, said = random.Random(0), dict(RUNS[run])
    tags = run.startswith("sequence")
    model, rows, _ = _tagger(folder, draw, said) if tags else _classifier(folder, draw, said, run)
    corpus = Corpus(train=FlairDatapointDataset(rows), sample_missing_splits=False)
    trainer = ModelTrainer(model, corpus)
    trainer.fine_tune(output / "out", learning_rate=1e-3, max_epochs=1, save_final_model=False)


if __name__ == "__main__":
    with watched(Path(sys.argv[3])):
        _train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
