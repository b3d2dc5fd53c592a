"""Run one neighbour on a tiny model, enabled before or after it, and compare it with itself without
autopack.

The reference is always the model that the neighbour made, not enabled: each document alone for
packed rows, the same padded batch for padded ones. In eval mode logits are compared, in train mode
the loss and, where the neighbour trains, the gradients of all parameters that have some."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import autopack
from autopack import tiny
from autopack.errors import AutopackError
from autopack.layout import IGNORED_LABEL
from autopack.runtime.tally import Tally
from compat.common import gradients_apart, said, short
from tests.engine import counted, padded_batch

BEFORE, AFTER = "before", "after"
"""When `autopack.enable` is called: before the neighbour has done its thing, or after it."""
LENGTHS = (7, 12, 5, 9)
TOLERANCE = {"logits": 1e-4, "loss": 1e-4, "gradients": 1e-3, "results": 1e-4}
"""Float32: logits, of their standard deviation; losses, relative; gradients, of the norm of their
parameter's; other results, of their standard deviation."""
BAD = ("LEAKS", "other numbers", "crash")
LOOKS = 2
"""Padded batches before the one that is judged: the first ones may run as they came, while autopack
looks for what reads padding."""

Enable = Callable[[Any], None]
Make = Callable[[str, Enable], Any]
Call = dict[str, Any]


class CannotRun(Exception):
    """The neighbour does not run here even without autopack; says why."""


@dataclass(frozen=True)
class Scenario:
    """One thing that a neighbour does to a model."""

    neighbour: str
    """The name of the package."""
    what: str
    make: Make
    """Builds the model, enables it by the function that it is given at the time of the order, and
    returns it."""
    orders: tuple[str, ...] = (BEFORE, AFTER)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """In what the model is made and called; takes back what the neighbour did to others."""
    trains: bool = True
    """Whether gradients are compared."""
    evaluates: bool = True
    """Whether logits are those of evaluation; otherwise those of train mode."""
    within: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)
    """Largest errors."""
    note: str = ""


@dataclass
class Answers:
    """What a model gave: logits of the real tokens, the loss, gradients by the names of
    parameters."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, wanted: Answers) -> dict[str, float]:
        """The largest errors, by what is compared; infinite where parameters with gradients are
        others."""
        found = {
            "logits": ((self.logits - wanted.logits).abs().max() / wanted.logits.std()).item(),
            "loss": abs(self.loss - wanted.loss) / abs(wanted.loss),
        }
        if self.gradients.keys() != wanted.gradients.keys():
            return {**found, "gradients": float("inf")}
        if wanted.gradients:
            found["gradients"] = gradients_apart(self.gradients, wanted.gradients)
        return found


def llama(**options: Any) -> Any:
    """The tiny Llama that most neighbours are put on."""
    return tiny.build("llama", attn_implementation="sdpa", **options)


def wrapping(apply: Callable[[Any], Any], build: Callable[[], Any] = llama) -> Make:
    """A scenario's `make` for what is done to a model that exists."""

    def make(order: str, enable: Enable) -> Any:
        model = build()
        if order == BEFORE:
            enable(model)
        torch.manual_seed(0)  # adapters draw their parameters
        model = apply(model)
        if order == AFTER:
            enable(model)
        return model

    return make


def perturb(model: Any, scale: float = 0.1) -> Any:
    """Move the trainable parameters away from where they start: a fresh adapter adds nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def measure(scenario: Scenario, order: str) -> dict[str, Any]:
    """What became of packed rows and of a padded batch; of stock's packed row, the largest error of
    its logits.

    Raises `CannotRun` where the neighbour itself does not run.
    """
    with scenario.around():
        try:
            stock = scenario.make(order, lambda model: None)
            alone, padded = _run(stock, scenario, "alone"), _run(stock, scenario, "padded")
            leak = _run(stock, scenario, "packed").errors(alone)["logits"]
        except Exception as error:
            raise CannotRun(short(said(error))) from error
    if not (alone.logits.isfinite().all() and math.isfinite(alone.loss)):
        raise CannotRun("it gives what is no number")
    control = float(f"{leak:.1e}")
    handles: list[Any] = []
    with scenario.around():
        try:
            model = scenario.make(order, lambda model: handles.append(autopack.enable(model)))
        except Exception as error:
            raised = _raised(error)
            return {"packed": raised, "padded": raised, "stock": control}
        if autopack.is_enabled(model):
            handles.append(autopack.enable(model))  # that of a copy
        found = {"packed": _verdict(model, scenario, "packed", alone, "LEAKS")}
        for handle in handles:
            with contextlib.suppress(Exception):  # the verdict says so
                for _ in range(LOOKS):
                    _run(model, scenario, "padded")
            handle.enabled.tally = Tally()
        found["padded"] = _verdict(model, scenario, "padded", padded, "other numbers", handles)
    return {**found, "stock": control}


def _verdict(
    model: Any, of: Scenario, form: str, wanted: Answers, wrong: str, handles: Any = None
) -> dict[str, Any]:
    try:
        errors = _run(model, of, form).errors(wanted)
    except Exception as error:
        return _raised(error)
    return _judged(
        {name: float(f"{value:.1e}") for name, value in errors.items()}, of.within, wrong, handles
    )


def _raised(error: Exception) -> dict[str, Any]:
    return {
        "status": "refused" if isinstance(error, AutopackError) else "crash",
        "reason": short(said(error)),
    }


def _judged(
    errors: dict[str, float], within: Mapping[str, float], wrong: str, handles: list[Any] | None
) -> dict[str, Any]:
    if not all(value <= within[name] for name, value in errors.items()):
        return {"status": wrong, "errors": errors}
    if handles is not None:
        reasons = [
            reason for handle in handles for reason in (*handle.tally.left, *handle.tally.refused)
        ]
        if reasons or not any(handle.tally.batches for handle in handles):
            reason = (
                "; ".join(dict.fromkeys(reasons)) or "no padded batch came to the enabled model"
            )
            return {"status": "left as it came", "reason": short(reason), "errors": errors}
    return {"status": "exact", "errors": errors}


def documents(config: Any) -> list[torch.Tensor]:
    """Random documents, each of shape (1, tokens)."""
    return list(tiny.tokens(config, 1, sum(LENGTHS), seed=0).split(list(LENGTHS), dim=1))


def calls_of(form: str, texts: list[torch.Tensor]) -> list[Call]:
    """The documents as calls with labels: each alone, all in one row, or as rows padded on the
    right."""
    if form == "alone":
        return [{"input_ids": text, "labels": text} for text in texts]
    if form == "packed":
        ids = torch.cat(texts, dim=1)
        return [{"input_ids": ids, "position_ids": counted(LENGTHS), "labels": ids}]
    batch = padded_batch([text[0] for text in texts])
    real = batch["attention_mask"].bool()
    return [{**batch, "labels": batch["input_ids"].masked_fill(~real, IGNORED_LABEL)}]


def _run(model: Any, scenario: Scenario, form: str) -> Answers:
    count = sum(length - 1 for length in LENGTHS)
    config = next(found.config for found in model.modules() if hasattr(found, "config"))
    calls, logits = calls_of(form, documents(config)), []
    model.train(not scenario.evaluates)
    for call in calls:
        unlabelled = {name: value for name, value in call.items() if name != "labels"}
        if form == "padded":
            # without it evaluation may want the cache, and is left as it comes
            unlabelled["use_cache"] = False
        with torch.set_grad_enabled(not scenario.evaluates):
            # A learned prompt stands before the tokens.
            found = model(**unlabelled).logits[:, -call["input_ids"].shape[1] :].detach()
        logits.append(
            found[call["attention_mask"].bool()] if form == "padded" else found.flatten(0, 1)
        )
    model.train(scenario.trains)
    model.zero_grad()
    loss = 0.0
    with torch.set_grad_enabled(scenario.trains):
        for call in calls:
            part = model(**call, num_items_in_batch=count).loss
            if part.requires_grad:
                part.backward()
            loss += part.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    samples = {
        name: p.grad_sample for name, p in model.named_parameters() if hasattr(p, "grad_sample")
    }
    if form == "padded":
        gradients |= {
            f"{name}, of each sample": each.clone()
            for name, each in samples.items()
            if each is not None
        }
    model.zero_grad()
    if scenario.trains and not gradients:
        raise CannotRun("no parameter gets a gradient")
    return Answers(torch.cat(logits).float(), loss, gradients)
