"""All arms on one model: that they compute the same, what memory they take, and how fast they are, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.auditing.cases import tokens_to_draw
from autopack.bench.batches import ARMS, BASELINE, GROUPED, Arm, Batch, calls_of, grouped
from autopack.bench.estimate import padded_arms
from autopack.bench.machine import kept_by, load, origin, peak_memory, wait_for
from autopack.bench.race import LEAST, Entrant, Lap, by_the_clock, race
from autopack.bench.result import Outcome, Result, Settings
from autopack.bench.subjects import longest_document
from autopack.enabling.enable import enable
from autopack.enabling.handle import Handle
from autopack.errors import AutopackError
from autopack.inspection.configs import text_config
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, is_pair
from autopack.layout import IGNORED_LABEL
from autopack.packing.balance import CostModel
from autopack.packing.collator import PackingCollator

WANTED_ROUNDS, FEW_BATCHES, MOST_BATCHES = 8, 4, 16
_OF_PADDED, _PREPARING, _COMPARING = 0.6, 4, 0.4
"""For a guess of the time: what an arm takes of padded's, its steps before rounds begin, a forward pass in steps."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
_Found = TypeVar("_Found")


class CannotBench(AutopackError):
    """Nothing can be timed of this model on these documents."""

    code = "not-timed"


def compare(
    model: PreTrainedModel,
    lengths: np.ndarray,
    settings: Settings,
    about: dict[str, Any] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
    progress: Callable[[float], None] = lambda share: None,
) -> Result:
    """Times padded batches and packed rows of documents of these lengths, stock and enabled, on this model.

    The model is trained meanwhile, at a rate that hardly moves it, and is to be thrown away. Every round runs every
    arm once over all batches, beginning with another arm. What fails in an arm, for lack of memory or otherwise, is
    recorded, and the others go on.

    Args:
        model: a causal or masked language model on its device.
        lengths: (documents,) ints, of which as many as are timed are drawn.
        about: what is said of the model, beside what it says itself.
        tell: called with a line at the beginning of every stage.
        progress: called with the share of the rounds that are over, 0 to 1.

    Raises `CannotBench` for documents longer than the model's positions, and for models whose loss is not one over
    tokens.
    """
    where, until = origin(), time.monotonic() + settings.seconds
    _check(model, lengths)
    text_config(model.config).use_cache = False  # as trainers have it
    shuffled = np.random.default_rng(settings.seed).permutation(lengths).tolist()
    bench = _Bench(model, settings)
    tell("timing a first step, to see how much fits")
    count = settings.batches or bench.batches_that_fit(shuffled[: settings.batch_size], until, tell)
    chosen = shuffled[: count * settings.batch_size]
    documents = [chosen[i : i + settings.batch_size] for i in range(0, len(chosen), settings.batch_size)]
    bench.take(documents)
    tell("comparing losses, measuring memory")
    for outcome in bench.outcomes:
        bench.prepare(outcome)
    tell(f"timing every arm on {len(documents)} x {settings.batch_size} documents")
    bench.run(until, progress)
    columns = {name: sum(len(b) * max(b) for b in form)
               for name, form in (("as drawn", documents), ("grouped", grouped(documents)))}  # fmt: skip
    found = {
        "class": type(model).__name__,
        "type": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": str(bench.device),
    }
    if bench.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(bench.device)
    padding_of_all = padded_arms(lengths, [settings.batch_size], CostModel(), settings.seed)[0].padding
    where["load at end"] = load()
    return Result(settings, where, {**(about or {}), **found}, documents, columns, padding_of_all, bench.outcomes)


def _check(model: PreTrainedModel, lengths: np.ndarray) -> None:
    name, most = type(model).__name__, longest_document(model)
    if is_pair(model) or row_head(model) is not None or not name.endswith(("LM", "LMHeadModel", "Generation")):
        raise CannotBench(f"wanted a causal or masked language model, whose loss is one over tokens, found {name}")
    if most is not None and lengths.max() > most:
        over = f"the longest document has {lengths.max():,} tokens, and {name} takes {most:,}"
        raise CannotBench(f"{over}; --max-length {most} cuts what is longer")


class _Bench:
    """The arms of one model: their calls, what they gave, and one optimizer for all."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self.model, self.settings, self.device = model, settings, device_of(model)
        self.shifted = PackingCollator.for_model(model).labels != "unshifted"
        self.vocabulary = tokens_to_draw(model)
        self.optimizer: torch.optim.Optimizer | None = None
        if not settings.forward:
            # A rate that moves no weight of half precision: all arms and rounds find the same model.
            fused = self.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, eps=1e-4, weight_decay=0.0, fused=fused)
        self.outcomes = [Outcome(arm) for arm in ARMS]
        self.calls: dict[str, list[dict[str, Any]]] = {}

    def batches_that_fit(self, lengths: list[int], until: float, tell: Callable[[str], None]) -> int:
        """How many batches like this a pass of an arm may have, for enough rounds in the time."""
        (call,) = calls_of(BASELINE, self.model, [self._batch(lengths, 0)])
        self.model.train(not self.settings.forward)

        def seconds() -> float:
            self._update(call)
            return by_the_clock(lambda: self._update(call), partial(wait_for, self.device))["wall"]

        taken, _ = self._tried(seconds)
        if taken is None:
            return FEW_BATCHES
        each = taken * len(ARMS) * _OF_PADDED
        left = until - time.monotonic() - _PREPARING * each
        if left < each * (least := LEAST + _COMPARING):
            wanted = each * (_PREPARING + least)
            tell(
                f"this takes about {wanted:.0f} s, since one batch takes {taken:.1g} s; shorter documents or fewer "
                f"would do, or --seconds {math.ceil(wanted)}"
            )
        return min(max(int(left / each / (WANTED_ROUNDS + _COMPARING)), 1), MOST_BATCHES)

    def take(self, documents: list[list[int]]) -> None:
        """Make the batches of all arms, which lie on the device before anything is timed."""
        for arm in ARMS:
            form = grouped(documents) if arm.form == GROUPED else documents
            self.calls[arm.name] = calls_of(arm, self.model, self._batches(documents, form))

    def prepare(self, outcome: Outcome) -> None:
        """Find out the loss of an arm, warm it up, and measure the memory of its largest batch."""
        calls = self.calls[outcome.arm.name]

        def work() -> None:
            with self._state(outcome.arm, verify=True) as handle:
                outcome.loss = self._loss(calls)
                self.model.train(not self.settings.forward)
                largest = max(calls, key=lambda call: call["input_ids"].numel())
                self._update(largest)
                if self.device.type in ("cpu", "cuda"):
                    kept = kept_by(self.model, self.optimizer, largest)
                    outcome.peak = peak_memory(lambda: self._update(largest), kept, str(self.device))
                if handle is not None and handle.tally.left:
                    outcome.note = str(handle.tally)

        _, outcome.failed = self._tried(work)
        wanted = self.outcomes[0].loss
        if outcome.loss is not None and wanted:
            outcome.difference = abs(outcome.loss / wanted - 1)

    def run(self, until: float, progress: Callable[[float], None]) -> None:
        """Run the rounds that were asked for, or as many as there is time for, and at least `LEAST`."""
        started, rounds, few = time.monotonic(), self.settings.rounds, [[2, 3]]
        racing = {outcome.arm.name: outcome for outcome in self.outcomes if outcome.failed is None}
        arms = {name: self._entrant(outcome.arm, self._batches(few, few)) for name, outcome in racing.items()}

        def attempt(name: str, lap: Callable[[], Lap]) -> Lap | None:
            found, racing[name].failed = self._tried(lap)
            return found

        def report(number: int, _: object) -> None:
            by_time = (time.monotonic() - started) / max(until - started, 1e-3)
            progress(number / rounds if rounds else min(number / LEAST, by_time, 1.0))

        form: dict[str, Any] = {"clock": partial(by_the_clock, wait=partial(wait_for, self.device))}
        form |= {"attempt": attempt, "report": report, "until": math.inf if rounds else until}
        for name, laps in race(arms, rounds, least=LEAST, **form).items():
            racing[name].seconds = [lap["wall"] for lap in laps]

    def _entrant(self, arm: Arm, few: list[Batch]) -> Entrant:
        """An arm in its state, which first does what a first call does that has just been given to it."""
        calls, (ready,) = self.calls[arm.name], calls_of(arm, self.model, few)

        @torch.no_grad()
        def get_ready() -> None:
            self.model(**ready)

        return Entrant(lambda: self._pass(calls), lambda: self._state(arm), get_ready)

    def _batch(self, lengths: list[int], seed: int) -> Batch:
        return Batch.of(lengths, self.vocabulary, seed, self.device, self.settings.prompt)

    def _batches(self, drawn: list[list[int]], form: list[list[int]]) -> list[Batch]:
        """The documents of `drawn` in the batches of `form`: the same tokens, whatever the order of lengths."""
        known: dict[int, list[torch.Tensor]] = {}
        for number, lengths in enumerate(drawn):
            batch = self._batch(lengths, self.settings.seed + number)
            for length, ids in zip(lengths, batch.documents, strict=True):
                known.setdefault(length, []).append(ids)
        return [Batch(list(lengths), torch.cat([known[n].pop() for n in lengths], dim=1)) for lengths in form]

    @torch.no_grad()
    def _loss(self, calls: list[dict[str, Any]]) -> float:
        """The mean loss over all targets of the documents, in evaluation mode."""
        self.model.eval()
        total, count = 0.0, 0
        for call in calls:
            labels = call["labels"][:, 1:] if self.shifted else call["labels"]
            targets = int((labels != IGNORED_LABEL).sum())
            if targets:
                total += float(self.model(**call).loss) * targets
                count += targets
        return total / count if count else float("nan")

    def _update(self, call: dict[str, Any]) -> None:
        if self.optimizer is None:
            with torch.no_grad():
                self.model(**call).loss  # noqa: B018
            return
        self.model(**call).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _pass(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            self._update(call)

    def _state(self, arm: Arm, verify: bool = False) -> AbstractContextManager[Handle | None]:
        if not arm.enabled:
            return nullcontext()
        return enable(self.model, backend=self.settings.backend, verify=verify)

    def _tried(self, act: Callable[[], _Found]) -> tuple[_Found | None, str | None]:
        """What an act on the model gives, or None and why: what fails leaves room for others."""
        try:
            return act(), None
        except AutopackError as raised:
            failed = f"refused: {_first_line(raised)}"
        except Exception as raised:  # whatever a model may raise in one form of the batch and not in another
            full = isinstance(raised, (torch.cuda.OutOfMemoryError, MemoryError))
            full = full or any(said in str(raised) for said in _NO_MEMORY)
            failed = "out of memory" if full else f"{type(raised).__name__}: {_first_line(raised)}"
        # Here and not above: an error holds the frames, and they the tensors, of what did not fit.
        self.model.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None, failed


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]
