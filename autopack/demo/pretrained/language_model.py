"""SmolLM2-135M three times: padded by stock, packed and enabled, and each document alone; perplexity and training."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopack.demo.batches import Example, pad, token_counts
from autopack.demo.corpus import collect_documents
from autopack.demo.pretrained.differences import relative_difference
from autopack.demo.pretrained.pairs import draw_apart
from autopack.demo.pretrained.weights import SMOLLM2, checked_folder

WAYS = ("padded", "packed", "alone")
"""The arms: stock on padded batches, an enabled model on packed rows, and stock on one document at a time."""
STOCK_ROW = "stock row"
"""The same packed rows in the stock model, by the plain call: evaluated only, to show what leaks."""
LOSS_TOLERANCE = 1e-5
"""Relative; about 5e-7 is seen, and in a row that leaks the loss differs in the second digit."""


@dataclass(frozen=True)
class LanguageSettings:
    """What is evaluated and trained. The defaults take about a minute on two CPU cores, and 5 GB of memory."""

    steps: int = 3
    seed: int = 0
    batch_size: int = 4
    held_out: int = 16
    longest: int = 96
    learning_rate: float = 0.05


class Arm:
    """One of the ways: its model, how it lays out a batch, and what was measured of it."""

    def __init__(self, way: str, model: Any, lay_out: Callable[[Sequence[Example]], list[dict[str, Any]]]) -> None:
        self.way, self.model, self.lay_out = way, model, lay_out
        self.losses: list[float] = []
        self.seconds = 0.0

    def evaluate(self, batch: Sequence[Example]) -> float:
        """The loss of a batch, the mean over all tokens that are predicted."""
        import torch

        self.model.eval()
        calls = self.lay_out(batch)
        with torch.no_grad():
            return sum(self.model(**call).loss.item() * share for call, share in _shares(calls))

    def backward(self, batch: Sequence[Example]) -> float:
        """The loss of a batch, whose gradients are added to those of the parameters."""
        self.model.train()
        total = 0.0
        for call, share in _shares(self.lay_out(batch)):
            loss = self.model(**call).loss * share
            loss.backward()
            total += loss.item()
        return total

    def step(self, batch: Sequence[Example], learning_rate: float) -> None:
        """Take a step of gradient descent, its norm clipped, and record loss and time."""
        import torch

        started = time.perf_counter()
        self.losses.append(self.backward(batch))
        # Steps of some seeds would otherwise diverge, which blows up rounding, whichever way batches are made.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= learning_rate * parameter.grad
        self.model.zero_grad()
        self.seconds += time.perf_counter() - started


def _shares(calls: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each call with its share of the tokens that all of them predict."""
    counts = [int((call["labels"][:, 1:] != -100).sum()) for call in calls]
    return [(call, count / sum(counts)) for call, count in zip(calls, counts, strict=True)]


def padded(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one padded call, without a cache, as trainers have it."""
    return [{**pad(batch), "use_cache": False}]


def alone(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one call per document."""
    return [call for example in batch for call in padded([example])]


def packed(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one packed row: tokens, positions that begin anew at each document, labels."""
    import autopack

    return [dict(autopack.PackingCollator()(batch))]


@dataclass(frozen=True)
class LanguageComparison:
    """What the demo of a language model shows, by way where there are several.

    `before` and `after` are the losses of the held-out batches, before and after the training. Among those before are
    the ones of `STOCK_ROW`, which no other way has to equal.
    """

    settings: LanguageSettings
    parameters: int
    threads: int
    real_tokens: int
    padded_tokens: int
    targets: list[int]
    before: dict[str, list[float]]
    losses: dict[str, list[float]]
    after: dict[str, list[float]]
    seconds: dict[str, float]

    @property
    def speedup(self) -> float:
        """Real tokens per second of training on packed rows over those of padded batches."""
        return self.seconds["padded"] / self.seconds["packed"]

    def perplexity(self, losses: Sequence[float]) -> float:
        """That of all held-out tokens, of the losses of their batches."""
        total = sum(loss * count for loss, count in zip(losses, self.targets, strict=True))
        return math.exp(total / sum(self.targets))

    def difference(self, way: str, other: str = "alone") -> float:
        """The largest relative difference of two ways' losses, in evaluation and training."""
        parts = (self.before, self.losses, self.after)
        return max(relative_difference(part[way], part[other]) for part in parts)

    @property
    def succeeded(self) -> bool:
        """Whether all ways have the same losses, within float32 rounding."""
        return all(self.difference(way) <= LOSS_TOLERANCE for way in WAYS)


def tokenize(texts: Sequence[str], tokenizer: Any, longest: int) -> list[Example]:
    """Encode every text as one example, cut after ``longest`` tokens."""
    return [{"input_ids": tokenizer(text)["input_ids"][:longest]} for text in texts]


def load() -> tuple[Any, Any]:
    """The model, in float32 and evaluation mode, and its tokenizer.

    Raises `WeightsMissing` or `WeightsChanged` before anything is loaded.
    """
    folder = checked_folder(SMOLLM2)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = SMOLLM2.files
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval(), tokenizer


def compare_language_model(
    settings: LanguageSettings,
    tell: Callable[[str], None] = lambda stage: None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> LanguageComparison:
    """Evaluate held-out documents in all ways, train on others step by step in turn, and evaluate again.

    `tell` is called with a short line at the beginning of every stage, and `progress` wraps the batches that are
    iterated over. Raises `WeightsMissing` or `WeightsChanged` before anything is loaded, and `CorpusTooSmall` where the
    Python installation holds too little text.
    """
    tell(f"checking the weights of {SMOLLM2.model}")
    checked_folder(SMOLLM2)
    tell("collecting the documentation of this Python installation")
    texts = collect_documents()

    tell("importing torch and transformers, and unpacking the weights to float32")
    import torch

    import autopack

    model, tokenizer = load()
    size = settings.batch_size
    drawn = draw_apart(texts, settings.held_out, settings.steps * size, settings.seed)
    held_out, of_training = (
        [examples[first : first + size] for first in range(0, len(examples), size)]
        for examples in (tokenize(some, tokenizer, settings.longest) for some in drawn)
    )

    arms = {
        "padded": Arm("padded", model, padded),
        "packed": Arm("packed", copy.deepcopy(model), packed),
        "alone": Arm("alone", copy.deepcopy(model), alone),
    }
    tell(f"evaluating {settings.held_out} documents in {len(arms)} ways, and packed in the stock model")
    stock_row = Arm(STOCK_ROW, model, packed)
    before = {STOCK_ROW: [stock_row.evaluate(batch) for batch in held_out]}
    autopack.enable(arms["packed"].model)
    before |= {way: [arm.evaluate(batch) for batch in held_out] for way, arm in arms.items()}
    for arm in arms.values():
        arm.backward(of_training[0][:2])  # so that first-call costs are not timed
        arm.model.zero_grad()

    tell(f"training in {len(arms)} ways, {settings.steps} steps each")
    for batch in progress(of_training):
        for arm in arms.values():
            arm.step(batch, settings.learning_rate)
    tell("evaluating again")
    after = {way: [arm.evaluate(batch) for batch in held_out] for way, arm in arms.items()}

    real_tokens, padded_tokens = token_counts(of_training)
    return LanguageComparison(
        settings=settings,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        threads=torch.get_num_threads(),
        real_tokens=real_tokens,
        padded_tokens=padded_tokens,
        targets=[sum(len(example["input_ids"]) - 1 for example in batch) for batch in held_out],
        before=before,
        losses={way: arm.losses for way, arm in arms.items()},
        after=after,
        seconds={way: arm.seconds for way, arm in arms.items()},
    )
