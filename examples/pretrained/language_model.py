"""SmolLM2-135M three times: padded by stock, packed and enabled, and each document alone;
perplexity and training."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopack.demo import LOSS_TOLERANCE, Example, collect_documents

from .arms import (
    Comparison,
    LanguageArm,
    Progress,
    Tell,
    differences,
    lengths_of,
    measured,
    packed,
    padded,
    train,
)
from .texts import alone, draw_apart, evaluate, in_batches
from .weights import SMOLLM2, checked_folder

WAYS = {"padded": padded, "packed": packed, "alone": alone}
"""The arms: stock on padded batches, an enabled model on packed rows, and stock on one document at
a time."""
STOCK_ROW = "stock row"
"""The same packed rows in the stock model, by the plain call: evaluated only, to show what
leaks."""


@dataclass(frozen=True)
class LanguageSettings:
    """What is evaluated and trained. The defaults take about a minute on two CPU cores, and 5 GB of
    memory."""

    steps: int = 3
    seed: int = 0
    batch_size: int = 4
    held_out: int = 16
    longest: int = 96
    learning_rate: float = 0.05


@dataclass(frozen=True, kw_only=True)
class LanguageComparison(Comparison):
    """What the demo of a language model shows.

    `before` and `after` are the losses of the held-out batches, before and after the training.
    Among those before are the ones of `STOCK_ROW`, which no other way has to equal."""

    targets: list[int]
    before: dict[str, list[float]]
    after: dict[str, list[float]]

    def perplexity(self, losses: Sequence[float]) -> float:
        """That of all held-out tokens, of the losses of their batches."""
        total = sum(loss * count for loss, count in zip(losses, self.targets, strict=True))
        return math.exp(total / sum(self.targets))

    def evaluation_difference(self, way: str) -> float:
        """The largest relative difference of a way's losses in evaluation from those of documents
        alone."""
        parts = [part for part in (self.before, self.after) if way in part]
        return max(max(differences(part[way], part["alone"])) for part in parts)

    @property
    def succeeded(self) -> bool:
        """Whether all ways have the same losses, within float32 rounding."""
        return self.losses_equal and all(
            self.evaluation_difference(way) <= LOSS_TOLERANCE for way in self.after
        )


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
    settings: LanguageSettings, tell: Tell = lambda stage: None, progress: Progress = iter
) -> LanguageComparison:
    """Evaluate held-out documents in all ways, train on others step by step in turn, and evaluate
    again.

    Raises `WeightsMissing` or `WeightsChanged` before anything is loaded, and `CorpusTooSmall`
    where the Python installation holds too little text."""
    tell(f"checking the weights of {SMOLLM2.model}")
    checked_folder(SMOLLM2)
    tell("collecting the documentation of this Python installation")
    texts = collect_documents()

    tell("importing torch and transformers, and unpacking the weights to float32")
    import torch

    import autopack

    model, tokenizer = load()
    drawn = draw_apart(
        texts, settings.held_out, settings.steps * settings.batch_size, settings.seed
    )
    held_out, of_training = (
        in_batches(tokenize(some, tokenizer, settings.longest), settings.batch_size)
        for some in drawn
    )
    stock_row = LanguageArm(model, packed)
    arms: dict[str, LanguageArm] = {}
    for way, lay_out in WAYS.items():
        own = copy.deepcopy(model) if arms else model
        arms[way] = LanguageArm(
            own, lay_out, torch.optim.SGD(own.parameters(), settings.learning_rate)
        )
    tell(
        f"evaluating {settings.held_out} documents in {len(arms)} ways, and packed in the stock "
        "model"
    )
    before = {STOCK_ROW: [evaluate(stock_row, batch) for batch in held_out]}
    autopack.enable(arms["packed"].model)
    before |= {way: [evaluate(arm, batch) for batch in held_out] for way, arm in arms.items()}
    for arm in arms.values():
        arm.warm_up(of_training[0][:2])
    train(arms, of_training, tell, progress)
    tell("evaluating again")
    return LanguageComparison(
        settings=settings,
        targets=[sum(length - 1 for length in batch) for batch in lengths_of(held_out)],
        before=before,
        after={way: [evaluate(arm, batch) for batch in held_out] for way, arm in arms.items()},
        **measured(arms, lengths_of(of_training)),
    )
