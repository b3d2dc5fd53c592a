"""All arms on one model: that they compute the same, what memory they take, and how fast they are, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.auditing.cases import tokens_to_draw
from autopack.bench.batches import ARMS, BASELINE, Arm, Batch
from autopack.bench.contest import Contest, Outcome
from autopack.bench.machine import load, origin
from autopack.bench.race import LEAST
from autopack.bench.subjects import longest_document
from autopack.enabling.enable import enable
from autopack.enabling.handle import Handle
from autopack.errors import AutopackError
from autopack.inspection.configs import text_config
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, is_pair
from autopack.layout import IGNORED_LABEL
from autopack.packing.collator import PackingCollator

WANTED_ROUNDS, FEW_BATCHES, MOST_BATCHES = 8, 4, 16
_OF_PADDED, _PREPARING, _COMPARING = 0.6, 4, 0.4
"""For a guess of the time: what an arm takes of padded's, its steps before rounds begin, a forward pass in steps."""
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-3, "float16": 1e-3}
"""How far losses may be apart, relative to padded's, and still count as equal: rounding, over thousands of tokens. A
random model's loss moves by a few thousandths where documents see each other."""


@dataclass(frozen=True)
class RaceSettings:
    """Settings of a race; `batches` and `rounds` of None are as many as fit into the seconds.

    The documents of a batch begin with the same `prompt` of so many tokens.
    """

    batch_size: int = 8
    batches: int | None = None
    rounds: int | None = None
    seconds: float = 60
    forward: bool = False
    backend: str = "auto"
    seed: int = 0
    prompt: int = 0


@dataclass
class Comparison:
    """Outcomes of `compare`, in the order of the arms; `documents` are the lengths in every padded batch."""

    settings: RaceSettings
    origin: dict[str, Any]
    model: dict[str, Any]
    documents: list[list[int]]
    columns: dict[str, int]
    outcomes: list[Outcome]

    @property
    def rounds(self) -> int:
        """Rounds in which all arms that were timed ran."""
        return max((len(outcome.seconds) for outcome in self.outcomes if outcome.timed), default=0)

    @property
    def wrong(self) -> list[Outcome]:
        """Arms that compute something else than padded, those that are known to left out."""
        return [outcome for outcome in self.outcomes if outcome.wrong]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; losses may be what JSON has no number for."""
        first = self.outcomes[0]
        return {
            "benchmark": "bench",
            "origin": self.origin,
            "settings": asdict(self.settings),
            "model": self.model,
            "documents": self.documents,
            "tokens": first.tokens,
            "columns": self.columns,
            "rounds": self.rounds,
            "loss tolerance": first.tolerance,
            "arms": {outcome.arm.name: outcome.as_dict() for outcome in self.outcomes},
        }


def compare(
    model: PreTrainedModel,
    lengths: np.ndarray,
    settings: RaceSettings,
    tell: Callable[[str], None] = lambda stage: None,
    progress: Callable[[int], Any] = lambda number: None,
) -> Comparison:
    """Time padded batches and packed rows of documents of these lengths, stock and enabled, on this model.

    The model is trained meanwhile, at a rate that hardly moves it, and is to be thrown away. Every round runs every
    arm once over all batches, beginning with another arm. What fails in an arm, for lack of memory or otherwise, is
    recorded, and the others go on.

    Args:
        model: a causal or masked language model on its device.
        lengths: (documents,) ints, of which as many as are timed are drawn.
        tell: called with a line at the beginning of every stage.
        progress: called with the number of each round that is over.

    Raises `AutopackError` for documents longer than the model's positions, and for models whose loss is not one over
    tokens.
    """
    where, until = origin(), time.monotonic() + settings.seconds
    _check(model, lengths)
    text_config(model.config).use_cache = False  # as trainers have it
    shuffled = np.random.default_rng(settings.seed).permutation(lengths).tolist()
    device, vocabulary, size = device_of(model), tokens_to_draw(model), settings.batch_size
    dtype = str(model.dtype).removeprefix("torch.")
    optimizer = None
    if not settings.forward:
        # A rate that moves no weight of half precision: all arms and rounds find the same model.
        on_gpu = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, eps=1e-4, weight_decay=0.0, fused=on_gpu)

    def state(arm: Arm, verify: bool = False) -> AbstractContextManager[Handle | None]:
        # Verified models have their first calls checked, which is not what is timed.
        return enable(model, backend=settings.backend, verify=verify) if arm.enabled else nullcontext()

    def contest(arms: tuple[Arm, ...], documents: list[list[int]]) -> Contest:
        batches = [
            Batch.of(each, vocabulary, settings.seed + number, device, settings.prompt)
            for number, each in enumerate(documents)
        ]
        return Contest(model, arms, batches, state, optimizer, TOLERANCES[dtype])

    count = settings.batches
    if count is None:
        tell("timing a first step, to see how much fits")
        count = _batches_that_fit(contest((BASELINE,), [shuffled[:size]]), until)
    chosen = shuffled[: count * size]
    documents = [chosen[i : i + size] for i in range(0, len(chosen), size)]
    whole = contest(ARMS, documents)
    tell("comparing losses, measuring memory")
    for outcome in whole.outcomes:
        whole.attempt(outcome, partial(_prepare, whole, outcome, state))
    tell(f"timing every arm on {len(documents)} x {size} documents")
    whole.race(settings.rounds, math.inf if settings.rounds else until, LEAST, progress)
    found = {
        "class": type(model).__name__,
        "type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype,
        "attention": model.config._attn_implementation,
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    forms = zip(("as drawn", "grouped"), ARMS, strict=False)
    columns = {name: sum(call["input_ids"].numel() for call in whole.calls[arm.name]) for name, arm in forms}
    where["load at end"] = load()
    return Comparison(settings, where, found, documents, columns, whole.outcomes)


def _check(model: PreTrainedModel, lengths: np.ndarray) -> None:
    name, most = type(model).__name__, longest_document(model)
    if is_pair(model) or row_head(model) is not None or not name.endswith(("LM", "LMHeadModel", "Generation")):
        raise AutopackError(
            f"wanted a causal or masked language model, whose loss is one over tokens, found {name}", code="not-timed"
        )
    if most is not None and lengths.max() > most:
        raise AutopackError(
            f"the longest document has {lengths.max():,} tokens, and {name} takes {most:,}; --max-length {most} cuts "
            f"what is longer",
            code="not-timed",
        )


def _batches_that_fit(first: Contest, until: float) -> int:
    """Return how many batches like this a pass of an arm may have, for enough rounds in the time."""
    first.model.train(first.optimizer is not None)
    first.race(2)
    if not first.outcomes[0].timed:
        return FEW_BATCHES
    each = first.outcomes[0].seconds[-1] * len(ARMS) * _OF_PADDED
    left = until - time.monotonic() - _PREPARING * each
    return min(max(int(left / each / (WANTED_ROUNDS + _COMPARING)), 1), MOST_BATCHES)


def _prepare(contest: Contest, outcome: Outcome, state: Callable[[Arm, bool], Any]) -> None:
    """Find out the loss of an arm, warm it up, and measure the memory of its largest batch."""
    with state(outcome.arm, True) as handle:
        outcome.loss = _loss(contest.model, contest.calls[outcome.arm.name])
        contest.measure_peak(outcome)
        if handle is not None and handle.tally.left:
            outcome.note = str(handle.tally)


@torch.no_grad()
def _loss(model: PreTrainedModel, calls: list[dict[str, Any]]) -> float:
    """Return the mean loss over all targets of the documents, in evaluation mode."""
    model.eval()
    total, count, shifted = 0.0, 0, PackingCollator.for_model(model).labels != "unshifted"
    for call in calls:
        labels = call["labels"][:, 1:] if shifted else call["labels"]
        targets = int((labels != IGNORED_LABEL).sum())
        if targets:
            total += float(model(**call).loss) * targets
            count += targets
    return total / count if count else float("nan")
