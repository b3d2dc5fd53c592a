"""The leak auditor: does a packed row give every document what it gets alone, in every way that people call a model?

Three measurements per call mode. *Packed against alone*: the logits of each document in the packed batch against the
same document run by itself. *Influence*: replace the tokens of one document and watch the logits of the others.
*Gradients*: the parameter gradients of a packed batch against the sum of those of its documents, and the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies, row_dependent_rotaries
from autopack.auditing.cases import MODES, Call, Case, NoReference, PairCase
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.results import loss_for, of_documents, of_rows
from autopack.errors import UnsupportedModel
from autopack.inspection.heads import is_head_of_pair
from autopack.inspection.modules import is_pair
from autopack.inspection.parameters import parameters_of
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
    if is_pair(base) and "input_ids" not in parameters_of(type(base)).names:
        raise UnsupportedModel(f"{type(base).__name__} takes recordings, of which the auditor has none")
    if is_head_of_pair(base):
        why = "gives one result per row, read off its decoder, so packed rows of it are refused: nothing to audit"
        raise UnsupportedModel(f"{type(base).__name__} {why}")
    chosen = modes or tuple(MODES)
    results: dict[tuple[str, bool], ModeResult] = {}
    left_out: dict[str, str] = {}
    with left_as_found(base):
        case = PairCase(base, lengths, seed) if is_pair(base) else Case(base, lengths, seed)
        for train in training:
            base.train(train)
            run = _Run(base, case)
            for name in chosen:
                try:
                    results[name, train] = run.measure(name, gradients)
                except NoReference as reason:
                    left_out[name] = str(reason)
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    tolerance = TOLERANCE.get(dtype, 1e-4)
    return LeakReport(
        model=f"{type(base).__name__} ({base.config.model_type})",
        implementation=str(getattr(base.config, "_attn_implementation", None) or "eager"),
        enabled=handle_of(base) is not None,
        dtype=str(dtype).removeprefix("torch."),
        lengths=lengths,
        tolerance=tolerance,
        gradient_tolerance=_GRADIENT_FACTOR * tolerance,
        loss_tolerance=max(_LOSS_TOLERANCE, _GRADIENT_FACTOR * tolerance),
        results=[results[name, train] for name in chosen for train in training if (name, train) in results],
        left_out=left_out,
    )


class _Run:
    """One model in one training mode: the ways to call it, against what documents get by themselves.

    Documents alone are run once for all call modes that have them at the same position.
    """

    def __init__(self, model: PreTrainedModel, case: Case):
        self.model, self.case = model, case
        self._results: dict[tuple[int, int], torch.Tensor] = {}
        self._losses: dict[Any, torch.Tensor] = {}
        self._gradients: tuple[Any, list[torch.Tensor]] = (None, [])

    def measure(self, name: str, gradients: bool) -> ModeResult:
        """Run one call mode; raises `NoReference` where it has documents begin where the model cannot run them."""
        call, alone, train = MODES[name](self.case), None, self.model.training
        try:
            alone = self._alone(call)
            packed = self._packed(call)
            scale = float(torch.cat([a.detach().double().flatten() for a in alone]).std())
            error = max(_largest(p - a) / scale for p, a in zip(packed, alone, strict=True))
            influence = self._influence(call, packed, scale)
            gradient = self._gradient_error(call, packed) if gradients else None
            return ModeResult(name, train, error, influence, gradient, self._loss_error(call))
        except Exception as failure:
            said = f"{type(failure).__name__}: {failure}"
            if alone is None and any(call.first):
                raise NoReference(said) from failure
            return ModeResult(name, train, failure=said)

    def _packed(self, call: Call, replaced: int | None = None) -> list[torch.Tensor]:
        return of_documents(self.model, call, self.model(**self.case.given(call, replaced)))

    def _alone(self, call: Call) -> list[torch.Tensor]:
        """The results of each document of a call, with their graph.

        A document that stands in two rows has a graph for each: where upstream goes through float32, gradients of two
        uses round otherwise than the sum of each.
        """
        for number, first in enumerate(call.first):
            if (number, first) not in self._results:
                self._results[number, first] = of_rows(self._run(call, number))[0]
        return [self._results[key] for key in enumerate(call.first)]

    def _run(self, call: Call, number: int, **labels: torch.Tensor) -> Any:
        one = torch.zeros(1, 1, dtype=torch.long, device=self.case.device)
        for rotary in row_dependent_rotaries(self.model):
            kinds = rotary.__dict__.get("rope_type")
            kind = {"layer_type": next(iter(kinds))} if isinstance(kinds, dict) else {}
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})
        return self.model(use_cache=False, **labels, **self.case.alone(call, number))

    @torch.no_grad()
    def _influence(self, call: Call, packed: list[torch.Tensor], scale: float) -> np.ndarray:
        """influence[i, j]: change of document i's logits when document j is replaced, relative; NaN on the diagonal."""
        matrix = np.full((len(packed), len(packed)), np.nan)
        for j in range(len(packed)):
            matrix[:, j] = [_largest(c - p) / scale for c, p in zip(self._packed(call, j), packed, strict=True)]
        np.fill_diagonal(matrix, np.nan)
        return matrix

    def _gradient_error(self, call: Call, packed: list[torch.Tensor]) -> float | None:
        """Largest difference of a parameter's gradient, relative to the largest entry of that parameter's gradient.

        Gradients that are zero but for rounding (biases that a softmax or norm cancels) count relative to the largest
        gradient of the model instead. What is differentiated is a weighted sum of all results, with the same weights
        for the same documents.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
        if not parameters:
            return None
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(result.shape, generator=generator).to(result) for result in packed]
        if self._gradients[0] != call.first:
            try:
                self._gradients = call.first, _grad(self._alone(call), weights, parameters)
            except Exception:
                if self.model.training:
                    raise
                return None  # some models have gradients in train mode alone
        expected = self._gradients[1]
        largest = [float(e.abs().max()) for e in expected]
        scales = [max(each, 1e-2 * max(largest)) for each in largest]
        found = _grad(packed, weights, parameters)
        return max(_largest(f - e) / scale for f, e, scale in zip(found, expected, scales, strict=True))

    def _loss_error(self, call: Call) -> float | None:
        """Relative difference of the model's own loss, packed, from the mean over all terms of the documents alone."""
        loss = loss_for(self.model, self.case, call)
        if loss is None or not any(loss.counts):
            return None  # documents of one token predict nothing
        with torch.no_grad():
            try:
                found = float(self.model(**self.case.given(call), **loss.packed).loss)
            except UnsupportedModel:
                return None  # logits are computed without labels, and with them the call is refused
            terms = [self._loss_alone(call, i, loss.alone[i]).double() * n for i, n in enumerate(loss.counts) if n > 0]
        expected = float(torch.stack(terms).sum()) / sum(loss.counts)
        return abs(found - expected) / abs(expected)

    def _loss_alone(self, call: Call, number: int, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        key = number, call.first[number], *(bytes(label.cpu().numpy()) for label in labels.values())
        if key not in self._losses:
            self._losses[key] = self._run(call, number, **labels).loss
        return self._losses[key]


def _largest(difference: torch.Tensor) -> float:
    value = float(difference.detach().abs().max())
    return value if np.isfinite(value) else float("inf")


def _grad(results: list[torch.Tensor], weights: list[torch.Tensor], parameters: list[Any]) -> list[torch.Tensor]:
    total = torch.stack([(r * w).sum() for r, w in zip(results, weights, strict=True)]).sum()
    # Documents alone are in the graphs of several call modes.
    return list(torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True))
