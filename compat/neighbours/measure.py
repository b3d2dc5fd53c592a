"""Run one neighbour on a tiny model, enabled before or after it, and compare it with itself without autopack.

The reference is always the model that the neighbour made, not enabled: each document alone for packed rows, the same
padded batch for padded ones. In eval mode logits are compared, in train mode the loss and, where the neighbour trains,
the gradients of all parameters that have some.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import autopack
from autopack import tiny
from autopack.errors import AutopackError

BEFORE, AFTER = "before", "after"
"""When `autopack.enable` is called: before the neighbour has done its thing, or after it."""
LENGTHS = (7, 12, 5, 9)
IGNORED = -100
TOLERANCE = {"logits": 1e-4, "loss": 1e-4, "gradients": 1e-3}
"""Float32: logits, of their standard deviation; losses, relative; gradients, of the norm of their parameter's."""
BAD = ("LEAKS", "other numbers", "crash")

Enable = Callable[[Any], None]
Make = Callable[[str, Enable], Any]


class CannotRun(Exception):
    """The neighbour does not run here even without autopack; says why."""


@dataclass(frozen=True)
class Scenario:
    """One thing that a neighbour does to a model."""

    neighbour: str
    """The name of the package."""
    what: str
    make: Make
    """Builds the model, enables it by the function that it is given at the time of the order, and returns it."""
    orders: tuple[str, ...] = (BEFORE, AFTER)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """In what the model is made and called; takes back what the neighbour did to others."""
    trains: bool = True
    """Whether gradients are compared."""
    note: str = ""


@dataclass
class Answers:
    """What a model gave: logits of the real tokens, the loss, gradients by the names of parameters."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, wanted: Answers) -> dict[str, float]:
        """The largest errors, by what is compared; infinite where parameters with gradients are others."""
        found = {
            "logits": ((self.logits - wanted.logits).abs().max() / wanted.logits.std()).item(),
            "loss": abs(self.loss - wanted.loss) / abs(wanted.loss),
        }
        if self.gradients.keys() != wanted.gradients.keys():
            return {**found, "gradients": float("inf")}
        pairs = [(gradient, wanted.gradients[name]) for name, gradient in self.gradients.items()]
        if pairs:
            # Gradients of nothing but rounding have no scale of their own.
            least = 1e-3 * max(given.norm().item() for _, given in pairs)
            found["gradients"] = max((a - b).norm().item() / max(b.norm().item(), least) for a, b in pairs)
        return found


@dataclass
class Made:
    """A model, and the handle where it is enabled."""

    model: Any
    handles: list[Any] = field(default_factory=list)


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
    """What became of packed rows and of a padded batch; of stock's packed row, the largest error of its logits.

    Raises `CannotRun` where the neighbour itself does not run.
    """
    with scenario.around():
        try:
            stock = scenario.make(order, lambda model: None)
            alone, padded = run_alone(stock, scenario.trains), run_padded(stock, scenario.trains)
            leak = run_packed(stock, scenario.trains).errors(alone)["logits"]
        except Exception as error:
            raise CannotRun(said(error)) from error
    if not (alone.logits.isfinite().all() and alone.loss == alone.loss):
        raise CannotRun("it gives what is no number")
    with scenario.around():
        made = Made(None)
        try:
            made.model = scenario.make(order, lambda model: made.handles.append(autopack.enable(model)))
        except AutopackError as error:
            refused = {"status": "refused", "reason": said(error)}
            return {"packed": refused, "padded": refused, "stock": leak}
        except Exception as error:
            crash = {"status": "crash", "reason": said(error)}
            return {"packed": crash, "padded": crash, "stock": leak}
        found = {"packed": _verdict(run_packed, made, alone, scenario, "LEAKS")}
        found["padded"] = _verdict(run_padded, made, padded, scenario, "other numbers")
        return {**found, "stock": leak}


def _verdict(run: Callable[..., Answers], made: Made, wanted: Answers, of: Scenario, wrong: str) -> dict[str, Any]:
    try:
        errors = run(made.model, of.trains).errors(wanted)
    except AutopackError as error:
        return {"status": "refused", "reason": said(error)}
    except Exception as error:
        return {"status": "crash", "reason": said(error)}
    errors = {name: float(f"{value:.1e}") for name, value in errors.items()}
    if any(not value <= TOLERANCE[name] for name, value in errors.items()):
        return {"status": wrong, "errors": errors}
    if run is run_padded:
        reasons = [reason for handle in made.handles for reason in (*handle.tally.left, *handle.tally.refused)]
        if reasons or not any(handle.tally.batches for handle in made.handles):
            reason = "; ".join(dict.fromkeys(reasons)) or "the calls do not reach the enabled model"
            return {"status": "left as it came", "reason": short(reason), "errors": errors}
    return {"status": "exact", "errors": errors}


def documents(config: Any) -> list[torch.Tensor]:
    """Random documents, each of shape (1, tokens)."""
    return list(tiny.tokens(config, 1, sum(LENGTHS), seed=0).split(list(LENGTHS), dim=1))


def packed(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The documents in one row, as collators make it."""
    ids = torch.cat(texts, dim=1)
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(text.shape[1]) for text in texts])[None]}


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The documents as rows, padded on the right."""
    columns = max(text.shape[1] for text in texts)
    ids = torch.cat([torch.nn.functional.pad(text, (0, columns - text.shape[1])) for text in texts])
    mask = torch.tensor([[1] * text.shape[1] + [0] * (columns - text.shape[1]) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def run_packed(model: Any, trains: bool) -> Answers:
    """One packed row."""
    call = packed(documents(model.config if hasattr(model, "config") else model.module.config))
    return _run(model, [(call, call["input_ids"], slice(None))], trains)


def run_alone(model: Any, trains: bool) -> Answers:
    """Every document by itself; the loss is the mean over the tokens of all."""
    texts = documents(model.config if hasattr(model, "config") else model.module.config)
    return _run(model, [({"input_ids": text}, text, slice(None)) for text in texts], trains)


def run_padded(model: Any, trains: bool) -> Answers:
    """The padded batch."""
    call = padded(documents(model.config if hasattr(model, "config") else model.module.config))
    real = call["attention_mask"].bool()
    return _run(model, [(call, call["input_ids"].masked_fill(~real, IGNORED), real)], trains)


def _run(model: Any, calls: list[tuple[dict[str, Any], torch.Tensor, Any]], trains: bool) -> Answers:
    count = sum(length - 1 for length in LENGTHS)
    model.eval()
    with torch.no_grad():
        logits = [model(**call).logits[real].flatten(0, -2).float() for call, _, real in calls]
    loss = 0.0
    model.train(trains)
    model.zero_grad()
    with torch.set_grad_enabled(trains):
        for call, labels, _ in calls:
            part = model(**call, labels=labels, num_items_in_batch=count).loss
            if trains:
                part.backward()
            loss += part.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if trains and not gradients:
        raise CannotRun("no parameter gets a gradient")
    return Answers(torch.cat(logits), loss, gradients)


def said(error: BaseException) -> str:
    """The kind of an error and the beginning of its message."""
    return short(f"{type(error).__name__}: {error}")


def short(text: str) -> str:
    """One line of at most 240 characters, without addresses and paths of this machine."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", re.sub(r"(/[\w.+-]+){3,}/", "", " ".join(text.split())))
    return text if len(text) <= 240 else text[:239] + "…"


@contextlib.contextmanager
def kept(*places: tuple[Any, str]) -> Iterator[None]:
    """Put the attributes back on leaving."""
    given = [(holder, name, getattr(holder, name)) for holder, name in places]
    try:
        yield
    finally:
        for holder, name, value in given:
            setattr(holder, name, value)
