"""The leak auditor: does a packed row give every document what it gets alone, in every way that people call a model?

Three measurements per call mode. *Packed against alone*: the logits of each document in the packed batch against the
same document run by itself. *Influence*: replace the tokens of one document and watch the logits of the others.
*Gradients*: the parameter gradients of a packed batch against the sum of those of its documents, and the loss.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies, row_dependent_rotaries
from autopack.auditing.cases import MODES, AnyCase, Call, Case, NoReference, PairCase
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.results import loss_for, of_document, of_documents
from autopack.errors import UnsupportedModel
from autopack.inspection.heads import is_head_of_pair
from autopack.inspection.modules import is_pair
from autopack.integrations.wrappers import unwrap
from autopack.runtime.marks import handle_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest error, relative to the standard deviation of the logits alone, that counts as rounding.

In float32 two orders of matrix products differ by about 1e-6 of the logits' scale, and leaks start near 1e-2: 1e-4 lies
well between. float64 leaves 1e-14. The half precisions keep 11 and 8 bits per operation over the depth of a model.
"""
_LOSS_TOLERANCE = 1e-5
"""transformers computes the loss in float32 whatever the model's dtype, so it is never held to less than this."""
_GRADIENT_FACTOR = 10
"""Gradients sum over all tokens and layers; they are held to ten times the tolerance of the logits."""


def audit(
    model: Any,
    *,
    lengths: tuple[int, ...] = (7, 12, 5, 9),
    modes: tuple[str, ...] | None = None,
    training: tuple[bool, ...] = (False, True),
    gradients: bool = True,
    seed: int = 0,
) -> LeakReport:
    """Measure whether documents that share a row see each other, on this very model, where it is.

    Args:
        model: A transformers model (or one wrapped by PEFT, DDP, accelerate, `torch.compile`), enabled or not. Weights,
            gradients, training mode and random state are left as they were.
        lengths: Lengths in tokens of the random documents of a row; two or more.
        modes: Names among `MODES`; all of them by default.
        training: Which of eval (False) and train (True) to run. Dropout and router noise are off in both.
        gradients: Whether to compare the gradients of all trainable parameters; costs four times their memory.
        seed: Seed of the documents.

    Returns:
        A report: `.exact`, `.worst` (relative to the standard deviation of the logits alone), a table per
        call mode, the influence of each document on each other, as text, HTML and picture.
    """
    base = unwrap(model)
    unknown = set(modes or ()) - set(MODES)
    if unknown:
        raise ValueError(f"modes must be among {', '.join(MODES)}; found {', '.join(sorted(unknown))}")
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"lengths must name two or more documents of at least one token; found {lengths}")
    if not training:
        raise ValueError(f"training must name False, True or both; found {training}")
    if is_pair(base) and "input_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedModel(f"{type(base).__name__} takes recordings, of which the auditor has none")
    if is_head_of_pair(base):
        raise UnsupportedModel(
            f"{type(base).__name__} gives one result per row, read off its decoder, so packed rows of it are refused "
            f"and there is nothing to audit"
        )
    chosen = tuple(modes or MODES)
    results: dict[tuple[str, bool], ModeResult] = {}
    left_out: dict[str, str] = {}
    with _left_as_found(base):
        case = PairCase(base, lengths, seed) if is_pair(base) else Case(base, lengths, seed)
        for train in training:
            base.train(train)
            alone = _Alone(base, case)
            for name in chosen:
                try:
                    results[name, train] = _run_mode(base, case, alone, name, train, gradients)
                except NoReference as reason:
                    left_out[name] = str(reason)
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    return LeakReport(
        model=f"{type(base).__name__} ({base.config.model_type})",
        implementation=str(getattr(base.config, "_attn_implementation", None) or "eager"),
        enabled=handle_of(base) is not None,
        dtype=str(dtype).removeprefix("torch."),
        lengths=lengths,
        tolerance=TOLERANCE.get(dtype, 1e-4),
        gradient_tolerance=_GRADIENT_FACTOR * TOLERANCE.get(dtype, 1e-4),
        loss_tolerance=max(_LOSS_TOLERANCE, _GRADIENT_FACTOR * TOLERANCE.get(dtype, 1e-4)),
        results=[results[name, train] for name in chosen for train in training if (name, train) in results],
        left_out=left_out,
    )


class _Alone:
    """What documents get by themselves, run once for all call modes that have them at the same position."""

    def __init__(self, model: PreTrainedModel, case: AnyCase):
        self.model = model
        self.case = case
        self._results: dict[tuple[int, int], torch.Tensor] = {}
        self._losses: dict[Any, torch.Tensor] = {}
        self._gradients: tuple[Any, list[torch.Tensor]] = (None, [])

    def results(self, call: Call) -> list[torch.Tensor]:
        """The results of each document of a call, with their graph."""
        for number, key in enumerate(self._keys(call)):
            if key not in self._results:
                self._results[key] = of_document(self.model, self._run(call, number))
        return [self._results[key] for key in self._keys(call)]

    def loss(self, call: Call, number: int, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one document of a call."""
        key = self._keys(call)[number], *(bytes(label.cpu().numpy()) for label in labels.values())
        if key not in self._losses:
            self._losses[key] = self._run(call, number, **labels).loss
        return self._losses[key]

    def gradients(self, call: Call, weights: list[torch.Tensor], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of a weighted sum of all results; the weights are the same for the same documents."""
        keys = self._keys(call)
        if self._gradients[0] != keys:
            self._gradients = keys, _grad(self.results(call), weights, parameters)
        return self._gradients[1]

    def _keys(self, call: Call) -> list[tuple[int, int]]:
        # A document that stands in two rows has a graph for each: where upstream goes through float32, gradients of two
        # uses round otherwise than the sum of each.
        return list(enumerate(call.first))

    def _run(self, call: Call, number: int, **labels: torch.Tensor) -> Any:
        for rotary in row_dependent_rotaries(self.model):
            reset_frequencies(rotary, _rotary_call(self.model, rotary, self.case.device))
        return self.model(use_cache=False, **labels, **self.case.alone(call, number))


def _run_mode(
    model: PreTrainedModel, case: AnyCase, reference: _Alone, name: str, train: bool, gradients: bool
) -> ModeResult:
    call = MODES[name](case)
    try:
        try:
            alone = reference.results(call)
        except Exception as failure:
            if not any(call.first):
                raise
            raise NoReference(f"{type(failure).__name__}: {failure}") from failure
        packed = _packed(model, case, call)
        scale = float(torch.cat([a.detach().double().flatten() for a in alone]).std())
        error = max(_largest(p - a) / scale for p, a in zip(packed, alone, strict=True))
        influence = _influence(model, case, call, packed, scale)
        gradient = _gradient_error(model, reference, call, packed) if gradients else None
        loss = _loss_error(model, case, reference, call)
    except NoReference:
        raise
    except Exception as failure:
        return ModeResult(name, train, failure=f"{type(failure).__name__}: {failure}")
    return ModeResult(name, train, error=error, influence=influence, gradient=gradient, loss=loss)


def _packed(model: PreTrainedModel, case: AnyCase, call: Call, replaced: int | None = None) -> list[torch.Tensor]:
    """What the packed call gives each document, with the tokens of one replaced where asked."""
    return of_documents(model, call, model(**case.given(call, replaced)))


def _rotary_call(model: PreTrainedModel, rotary: nn.Module, device: torch.device) -> dict[str, Any]:
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    call = {"x": torch.zeros(1, device=device), "position_ids": zero}
    kinds = rotary.__dict__.get("rope_type")
    return {**call, "layer_type": next(iter(kinds))} if isinstance(kinds, dict) else call


def _largest(difference: torch.Tensor) -> float:
    value = float(difference.detach().abs().max())
    return value if np.isfinite(value) else float("inf")


@torch.no_grad()
def _influence(
    model: PreTrainedModel, case: AnyCase, call: Call, packed: list[torch.Tensor], scale: float
) -> np.ndarray:
    """influence[i, j]: change of document i's logits when document j is replaced, relative; NaN on the diagonal."""
    count = len(call.spans)
    matrix = np.full((count, count), np.nan)
    for j in range(count):
        changed = _packed(model, case, call, replaced=j)
        for i in range(count):
            if i != j:
                matrix[i, j] = _largest(changed[i] - packed[i]) / scale
    return matrix


def _gradient_error(model: PreTrainedModel, reference: _Alone, call: Call, packed: list[torch.Tensor]) -> float | None:
    """Largest difference of a parameter's gradient, relative to the largest entry of that parameter's gradient.

    Gradients that are zero but for rounding (biases that a softmax or norm cancels) count relative to the largest
    gradient of the model instead.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
    if not parameters:
        return None
    generator = torch.Generator().manual_seed(1)

    def weights(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    chosen = [weights(result) for result in packed]
    try:
        expected = reference.gradients(call, chosen, parameters)
    except Exception:
        if model.training:
            raise
        return None  # some models have gradients in train mode alone
    found = _grad(packed, chosen, parameters)
    overall = max(float(e.abs().max()) for e in expected)
    return max(
        _largest(f - e) / max(float(e.abs().max()), 1e-2 * overall) for f, e in zip(found, expected, strict=True)
    )


def _grad(
    logits: list[torch.Tensor], weights: list[torch.Tensor], parameters: list[nn.Parameter]
) -> list[torch.Tensor]:
    """Gradient of a weighted sum of all logits."""
    total = torch.stack([(a * w).sum() for a, w in zip(logits, weights, strict=True)]).sum()
    # Documents alone are in the graphs of several call modes.
    grads = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]


def _loss_error(model: PreTrainedModel, case: AnyCase, reference: _Alone, call: Call) -> float | None:
    """Relative difference of the model's own loss: packed against the mean over all terms of the documents alone."""
    loss = loss_for(model, case, call)
    if loss is None or not any(loss.counts):
        return None  # documents of one token predict nothing
    with torch.no_grad():
        try:
            found = model(**case.given(call), **loss.packed).loss
        except UnsupportedModel:
            return None  # logits are computed without labels, and with them the call is refused
        terms = [reference.loss(call, i, loss.alone(i)).double() * n for i, n in enumerate(loss.counts) if n > 0]
    expected = float(torch.stack(terms).sum()) / sum(loss.counts)
    return abs(float(found) - expected) / abs(expected)


@contextlib.contextmanager
def _left_as_found(model: PreTrainedModel) -> Iterator[None]:
    """Run without dropout or router noise, and put modes, rates and random state back."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value and _is_noise(module, name)
    ]
    problem_type = getattr(model.config, "problem_type", None)  # a loss that finds none writes its guess here
    devices = [case for case in {p.device for p in model.parameters()} if case.type == "cuda"]
    # An audit may be asked for inside no_grad or inference_mode; gradients are part of it.
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        try:
            for module, name, _ in rates:
                setattr(module, name, 0.0)
            yield
        finally:
            for module, name, value in rates:
                setattr(module, name, value)
            for module, mode in modes:
                module.training = mode
            if getattr(model.config, "problem_type", None) != problem_type:
                model.config.problem_type = problem_type


def _is_noise(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return name == "p"
    return any(word in name for word in ("dropout", "layerdrop", "jitter", "drop_path"))
