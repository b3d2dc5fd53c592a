"""`autopack bench`: the losses, peak memory and speed of all arms on one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers

from autopack.auditing.cases import tokens_to_draw
from autopack.bench.race import (
    CONFIDENCE,
    LEAST,
    PADDED,
    ROW,
    Arm,
    Batch,
    Contest,
    Outcome,
    mebibytes,
    verdict,
)
from autopack.enabling.enable import enable
from autopack.errors import AutopackError
from autopack.inspection.configs import text_config
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, is_pair
from autopack.layout import IGNORED_LABEL
from autopack.packing.collator import PackingCollator
from autopack.pages import figure
from autopack.pages.figure import PACKED, Bar, Bars, Report, Sections, Table

BASELINE = Arm("padded", PADDED, False)
ARMS = (
    BASELINE,
    Arm("enabled, padded batches", PADDED, True),
    Arm("enabled, packed rows", ROW, True),
)
FEWEST, MOST, RUNS = 2, 16, 25
"""Bounds of the number of batches, and how often each is run: in rounds of all arms, and before."""
TOLERANCES = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 2e-3, "float16": 1e-3}
"""Largest differences of losses, relative to padded's, that are rounding, over thousands of tokens.
A random model's loss moves by a few thousandths where documents see each other."""


@dataclass
class Comparison(Report):
    """Results of `compare`: one `Outcome` per arm, in the order of the arms.

    `about` names the model, the source of the lengths, the device and the versions. `documents` are
    the lengths in every batch, and `padding` is the share of padding in padded ones.
    """

    about: dict[str, Any]
    documents: list[list[int]]
    padding: float
    outcomes: list[Outcome]

    @property
    def rounds(self) -> int:
        """Number of rounds that were timed."""
        return max(len(outcome.seconds) for outcome in self.outcomes)

    @property
    def wrong(self) -> list[Outcome]:
        """Outcomes of arms whose loss differs from the padded arm's by more than rounding."""
        return [each for each in self.outcomes if each.same_loss is False]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, in which a loss may be nan or infinite."""
        arms = {outcome.arm.name: outcome.as_dict(self.outcomes[0]) for outcome in self.outcomes}
        return {
            "about": self.about,
            "documents": self.documents,
            "padding": self.padding,
            "arms": arms,
        }

    def _sections(self) -> Sections:
        head = ["", "real tokens/s", "speed of padded", "peak MiB"]
        rows, bars = zip(*map(self._row_and_bar, self.outcomes), strict=True)
        caption = f"Real tokens per second and speed of padded, {self.rounds} rounds"
        return Sections(
            self._head(), [Table([head, *rows], "<>>>")], [Bars(caption, bars)], [*self._notes()]
        )

    def _head(self) -> list[str]:
        """Return three lines that name the model, the machine and the documents."""
        about, lengths = self.about, [length for batch in self.documents for length in batch]
        return [
            f"{about['name']}, {about['parameters'] / 1e6:,.1f} M parameters, {about['dtype']}, "
            f"{about['attention']}; {about['work']}",
            f"{about['device']}, threads: {about['threads']}; torch {about['torch']}, transformers "
            f"{about['transformers']}",
            f"{len(self.documents)} x {len(self.documents[0])} documents of {min(lengths):,} to "
            f"{max(lengths):,} tokens ({about['source']}), {sum(lengths):,} tokens; padding "
            f"{self.padding:.0%}",
        ]

    def _row_and_bar(self, outcome: Outcome) -> tuple[list[str], Bar]:
        """Return an arm's row of the table and its bar, with the reason if it was not timed."""
        name, speed = outcome.arm.name, outcome.speed
        if speed is None:
            why = outcome.failed or "not timed"
            return [name, why], Bar(name, 0.0, why[:50])
        ratio = outcome.over(self.outcomes[0])
        said = "1" if outcome.arm == BASELINE else "-" if ratio is None else verdict(ratio)
        color = PACKED if outcome.arm.enabled else figure.PADDED
        bar = Bar(name, speed.median, said, color, (speed.low, speed.high))
        return [name, str(speed), said, mebibytes(outcome.peak_bytes)], bar

    def _notes(self) -> Iterator[str]:
        """Yield the notes: wrong losses, notes on arms, the common loss, how time was measured."""
        first, tolerance = self.outcomes[0], TOLERANCES[self.about["dtype"]]
        for outcome in self.outcomes:
            if outcome in self.wrong:
                yield (
                    f'"{outcome.arm.name}" is WRONG; please report it: its loss is '
                    f"{outcome.loss:.4f}, and padded's "
                    f"{first.loss:.4f}."
                )
            if outcome.note is not None:
                yield f'"{outcome.arm.name}": {outcome.note}.'
        if not self.wrong and first.loss is not None:
            yield (
                f"All that ran has padded's loss on the same documents: {first.loss:.4f}, "
                f"within {tolerance:g} of it."
            )
        yield (
            f"Rounds in turns: {self.rounds}. Shown are their median and an interval that holds it "
            f"with {CONFIDENCE:.0%} confidence; a ratio is too noisy to tell where 1 lies in it. "
            "Peak memory is torch's, of the largest batch."
        )


def compare(
    model: Any,
    lengths: np.ndarray,
    *,
    batch_size: int = 8,
    seconds: float = 60,
    forward: bool = False,
    tell: Callable[[str], Any] = lambda stage: None,
    **about: str,
) -> Comparison:
    """Time a model on padded batches, stock and enabled, and on packed rows; return the results.

    The model is trained meanwhile, at a rate that hardly moves it, and is not to be used
    afterwards. Rounds go on for about `seconds`; each runs every arm once over all batches,
    beginning with another arm. An arm that fails, for lack of memory or otherwise, keeps the error,
    and the others go on.

    Args:
        model: a causal or masked language model on its device.
        lengths: (documents,) ints, from which the timed ones are drawn.
        forward: True for forward passes without gradients, instead of training steps.
        tell: called with a line at the beginning of every stage.
        about: the `name` of the model, and the `source` of the lengths.

    Raises `AutopackError` for models whose loss is not one over tokens.
    """
    name = type(model).__name__
    is_lm = name.endswith(("LM", "LMHeadModel", "Generation"))
    if is_pair(model) or row_head(model) is not None or not is_lm:
        raise AutopackError(
            "wanted a causal or masked language model, whose loss is one over tokens, found "
            f"{name}",
            code="not-timed",
        )
    until = time.monotonic() + seconds
    text_config(model.config).use_cache = False  # as trainers have it
    shuffled = np.random.default_rng(0).permutation(lengths).tolist()
    device, vocabulary = device_of(model), tokens_to_draw(model)
    dtype = str(model.dtype).removeprefix("torch.")
    # A rate that moves no weight of half precision: all arms and rounds find the same model.
    form: dict[str, Any] = {
        "lr": 1e-9,
        "eps": 1e-4,
        "weight_decay": 0.0,
        "fused": device.type == "cuda",
    }
    optimizer = None if forward else torch.optim.AdamW(model.parameters(), **form)

    def enabled_for(arm: Arm, verify: bool = False) -> AbstractContextManager[Any]:
        # Verified models have their first calls checked, which is not what is timed.
        return enable(model, verify=verify) if arm.enabled else nullcontext()

    def batches(count: int) -> list[Batch]:
        firsts = range(0, min(count * batch_size, len(shuffled)), batch_size)
        return [
            Batch.of(shuffled[first : first + batch_size], vocabulary, number, device)
            for number, first in enumerate(firsts)
        ]

    def measure_before_race(outcome: Outcome) -> None:
        """Record an arm's loss and peak memory, and note which batches kept their padding."""
        with enabled_for(outcome.arm, verify=True) as handle:
            outcome.loss = _loss(model, whole.calls[outcome.arm.name])
            whole.measure_peak(outcome)
            if handle is not None and handle.tally.left:
                outcome.note = str(handle.tally)

    tell("timing a first step, to see how much fits")
    trial = Contest(model, (BASELINE,), batches(1), enabled_for, optimizer)
    trial.race(2)
    taken = trial.outcomes[0].seconds
    chosen = batches(min(max(int(seconds / RUNS / taken[-1]), FEWEST), MOST) if taken else FEWEST)
    whole = Contest(model, ARMS, chosen, enabled_for, optimizer)
    tell("comparing losses, measuring memory")
    for outcome in whole.outcomes:
        whole.attempt(outcome, partial(measure_before_race, outcome))
        if outcome.loss is not None and (wanted := whole.outcomes[0].loss):
            outcome.same_loss = abs(outcome.loss / wanted - 1) <= TOLERANCES[dtype]
    tell(f"timing every arm on {len(chosen)} x {batch_size} documents")
    whole.race(until=until, least=LEAST)
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype,
        "attention": model.config._attn_implementation,
        "work": "forward passes, no gradients"
        if forward
        else "training steps: forward, backward, AdamW",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    columns = sum(call["input_ids"].numel() for call in whole.calls[BASELINE.name])
    padding, documents = 1 - whole.outcomes[0].tokens / columns, [batch.lengths for batch in chosen]
    return Comparison({**about, **found}, documents, padding, whole.outcomes)


@torch.no_grad()
def _loss(model: Any, calls: list[dict[str, Any]]) -> float:
    """Return the mean loss over all labels of the calls; puts the model into evaluation mode."""
    model.eval()
    total, count, shifted = 0.0, 0, PackingCollator.for_model(model).labels != "unshifted"
    for call in calls:
        labels = call["labels"][:, 1:] if shifted else call["labels"]
        if targets := int((labels != IGNORED_LABEL).sum()):
            total += float(model(**call).loss) * targets
            count += targets
    return total / count if count else float("nan")
