"""Flair: `fine_tune` with its defaults, for taggers and classifiers over a transformer, on random
words.

The tiny encoder has no dropout, so that steps can be compared; Flair's own, of words and of what
follows the encoder, is as ever, and draws the same numbers either way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._words import WORDS, text


def train(told: dict[str, Any], folder: Path, output: Path) -> None:
    """Make a model of Flair's and fine-tune it."""
    import flair
    from flair.data import Corpus
    from flair.datasets import FlairDatapointDataset
    from flair.trainers import ModelTrainer

    flair.set_seed(0)
    said = dict(told)
    kind, draw = said.pop("kind"), random.Random(0)
    model, rows = (_tagger if kind == "sequence tagger" else _classifier)(
        str(folder / "bert"), draw, said, kind
    )
    corpus = Corpus(train=FlairDatapointDataset(rows), sample_missing_splits=False)
    trainer = ModelTrainer(model, corpus)
    trainer.fine_tune(output / "out", learning_rate=1e-3, max_epochs=1, save_final_model=False)


def _known(labels: tuple[str, ...]) -> Any:
    from flair.data import Dictionary

    found = Dictionary(add_unk=False)
    for label in labels:
        found.add_item(label)
    return found


def _tagger(
    where: str, draw: random.Random, said: dict[str, Any], kind: str
) -> tuple[Any, list[Any]]:
    from flair.data import Sentence
    from flair.embeddings import TransformerWordEmbeddings
    from flair.models import SequenceTagger

    sentences = []
    for _ in range(24):
        sentence = Sentence(draw.choices(WORDS, k=draw.randrange(3, 60)))
        for token in sentence[:3]:
            token.add_label("ner", draw.choice(["PER", "LOC"]))
        sentences.append(sentence)
    context = {"use_context": said.pop("use_context", False)}
    embeddings = TransformerWordEmbeddings(where, layers="-1", fine_tune=True, **context)
    settings = {"use_crf": False, "use_rnn": False, "reproject_embeddings": False, **said}
    tags = _known(("O", "PER", "LOC"))
    return SequenceTagger(embeddings, tags, "ner", tag_format="BIO", **settings), sentences


def _classifier(
    where: str, draw: random.Random, said: dict[str, Any], kind: str
) -> tuple[Any, list[Any]]:
    from flair.data import Sentence, TextPair
    from flair.embeddings import TransformerDocumentEmbeddings
    from flair.models import TextClassifier, TextPairClassifier, TextRegressor

    embeddings = TransformerDocumentEmbeddings(where, fine_tune=True, **said)
    texts: list[Any] = [Sentence(text(draw, 60)) for _ in range(24)]
    if kind == "text regressor":
        for sentence in texts:
            sentence.add_label("score", str(draw.random()))
        return TextRegressor(embeddings, label_name="score"), texts
    if kind == "text pairs":
        texts = [TextPair(one, Sentence(text(draw, 30))) for one in texts]
    for each in texts:
        each.add_label("class", draw.choice(["good", "bad"]))
    made = TextPairClassifier if kind == "text pairs" else TextClassifier
    return made(embeddings, label_type="class", label_dictionary=_known(("good", "bad"))), texts
