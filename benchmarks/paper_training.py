"""What `benchmarks.paper` measures: the losses of an arm, the memory of its largest step, and the speed of all."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import autopack
from autopack.bench.race import Entrant, kept_by, peak_memory, race, wait_for
from benchmarks import workload
from benchmarks.paper_arms import ARMS, IGNORED, Arm, Corpus, Shape, padded, whole

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 4, "hidden": 128, "heads": 4},
    "small": {"layers": 4, "hidden": 256, "heads": 4},
    "1b": {
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "vocabulary": 128256,
        "intermediate_size": 8192,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "vocabulary": 32000, "intermediate_size": 11008},
}
"""`1b` has the shape of Llama-3.2-1B, its vocabulary too, of which the documents use a few tokens."""
WARM_UP = 10
LAST = 10
"""The training loss at a step is that of the last tenth of the steps until then."""
EVALUATED = 16


def build(options: argparse.Namespace, vocabulary: int) -> Any:
    """Return a random Llama; the same options give the same weights."""
    import torch

    shape = {"vocabulary": vocabulary, **MODELS[options.model]}
    if vocabulary > shape["vocabulary"]:
        raise ValueError(f"--model {options.model} has {shape['vocabulary']} tokens, and the documents {vocabulary}")
    positions, dtype = options.batch_size * options.max_length, getattr(torch, options.dtype)
    form = {"seed": options.seed, "attn": options.attn, "dtype": dtype, "max_position_embeddings": positions}
    return workload.llama(**shape, **form).to(options.device)


def prepare(enabled: bool, options: argparse.Namespace, vocabulary: int) -> Any:
    """The model of an arm, enabled or stock."""
    model = build(options, vocabulary)
    if enabled:
        autopack.enable(model)
    return model


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    """A call with its tensors on a device."""
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in call.items()}


def targets(call: dict[str, Any]) -> int:
    """How many labels the loss of a call is the mean of: the first of a row is no target."""
    return int((call["labels"][:, 1:] != IGNORED).sum())


@dataclass
class Trained:
    """What training of an arm gave: the loss and the targets of every step, and what was asked at some of them."""

    steps: int
    """Optimizer steps of one epoch."""
    tokens: int = 0
    columns: int = 0
    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    peak: int = 0

    def train_loss(self, step: int) -> float:
        """The mean over the targets of the last tenth of so many steps."""
        first = step - max(1, step // LAST)
        return float(np.average(self.losses[first:step], weights=self.counts[first:step]))

    def summary(self, common: int) -> dict[str, Any]:
        """What the tables show, at the end of an epoch and after `common` steps."""
        return {
            "steps": self.steps,
            "padding": 1 - self.tokens / self.columns,
            "peak bytes": self.peak,
            **{
                when: {"steps": step, "train": self.train_loss(step), "validation": self.validation[step]}
                for when, step in (("epoch", self.steps), ("common", common))
            },
            "losses": self.losses,
        }


def train(
    arm: Arm, corpus: Corpus, options: argparse.Namespace, common: int, report: Callable[[str], None] = print
) -> Trained:
    """Train a new model on an epoch, or on `common` steps where that is more; evaluate after both."""
    import torch

    lengths, shape = corpus.lengths, shape_of(options)
    model = prepare(arm.enabled, options, corpus.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    found = Trained(len(arm.choose(lengths, shape, 0)))
    largest: dict[str, Any] = {}
    for step, pieces in enumerate(arm.epochs(lengths, shape), 1):
        call = arm.collate(corpus.train, pieces, shape)
        if step <= found.steps:
            found.tokens += sum(piece.length for piece in pieces)
            found.columns += call["input_ids"].numel()
            largest = max(largest or call, call, key=lambda each: each["input_ids"].numel())
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, step / WARM_UP)
        found.counts.append(targets(call))
        found.losses.append(update(model, optimizer, on(options.device, call)).item())
        if step in (found.steps, common):
            found.validation[step] = evaluate(model, corpus, options)
            report(f"  step {step}: train {found.train_loss(step):.4f}, validation {found.validation[step]:.4f}")
        if step >= max(found.steps, common):
            break
    assert found.tokens == lengths.sum(), f"an epoch has {found.tokens} tokens of {lengths.sum()}"
    call = on(options.device, largest)
    found.peak = peak_memory(lambda: update(model, optimizer, call), kept_by(model, optimizer, call), options.device)
    return found


def update(model: Any, optimizer: Any, call: dict[str, Any]) -> Any:
    """One optimizer step; returns the loss, (), without a wait for the device."""
    import torch

    loss = model(**call).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def shape_of(options: argparse.Namespace) -> Shape:
    """The part of the options that arms choose by."""
    return Shape(options.batch_size, options.max_length, options.seed)


def evaluate(model: Any, corpus: Corpus, options: argparse.Namespace) -> float:
    """The validation loss of these weights in a stock model, on padded batches: the mean over all targets."""
    import torch

    stock = build(options, corpus.vocabulary).eval()
    stock.load_state_dict(model.state_dict())
    lengths = np.array([len(document) for document in corpus.validation])
    order = np.argsort(lengths, kind="stable")
    total, count = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(order), EVALUATED):
            pieces = whole(lengths, order[i : i + EVALUATED])
            call = padded(corpus.validation, pieces, shape_of(options))
            here = targets(call)
            total += stock(**on(options.device, call)).loss.item() * here
            count += here
    return total / count


def time_rounds(
    corpus: Corpus,
    options: argparse.Namespace,
    done: list[dict[str, dict[str, float]]],
    until: float,
    keep: Callable[[], None],
) -> bool:
    """Add to the rounds that are done the seconds of an epoch of the first `--timed` documents, arm by arm in turn.

    `keep` is called after each round. Return whether there was time for all rounds.
    """
    import torch

    lengths, shape = corpus.lengths[: options.timed], shape_of(options)
    models = {enabled: prepare(enabled, options, corpus.vocabulary) for enabled in (False, True)}
    optimizers = {enabled: torch.optim.AdamW(model.parameters(), lr=1e-5) for enabled, model in models.items()}
    runs: dict[str, Entrant] = {}
    for name, arm in ARMS.items():
        steps = arm.choose(lengths, shape, 0)
        calls = [on(options.device, arm.collate(corpus.train, pieces, shape)) for pieces in steps]
        step = partial(update, models[arm.enabled], optimizers[arm.enabled])
        step(min(calls, key=lambda call: call["input_ids"].numel()))  # the first call of an arm makes what stays

        def run(calls: list[dict[str, Any]] = calls, step: Callable[[Any], Any] = step) -> None:
            for call in calls:
                step(call)

        runs[name] = Entrant(run, wait=partial(wait_for, options.device))

    def report(number: int, laps: dict[str, Any]) -> None:
        done.append({arm: of[-1] for arm, of in laps.items()})
        keep()
        said = ", ".join(f"{arm} {of[-1]['wall']:.1f} s" for arm, of in laps.items())
        print(f"{corpus.name}, round {len(done)} of {options.rounds}: {said}", flush=True)

    race(runs, options.rounds - len(done), until=until, least=0, report=report)
    return len(done) >= options.rounds
