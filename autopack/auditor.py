"""The leak auditor: does a packed row give every document what it gets alone, in every way that people call a model?

Three measurements per call mode. *Packed against alone*: the logits of each document in the packed batch against the
same document run by itself. *Influence*: replace the tokens of one document and watch the logits of the others.
*Gradients*: the parameter gradients of a packed batch against the sum of those of its documents, and the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from autopack import api, upstream
from autopack.errors import UnsupportedModel
from autopack.positions import first_position
from autopack.report import LeakReport, ModeResult
from autopack.rotary import reset_frequencies, row_dependent_rotaries
from autopack.structure import shifts_labels
from autopack.wrapping import unwrap

__all__ = ["MODES", "TOLERANCE", "audit"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest error, relative to the standard deviation of the logits alone, that counts as rounding.

In float32 two orders of matrix products differ by about 1e-6 of the logits' scale, and leaks start near 1e-2: 1e-4 lies
well between. float64 leaves 1e-14. The half precisions keep 11 and 8 bits per operation over the depth of a model.
"""
_LOSS_TOLERANCE = 1e-5
"""transformers computes the loss in float32 whatever the model's dtype, so it is never held to less than this."""
_GRADIENT_FACTOR = 10
"""Gradients sum over all tokens and layers; they are held to ten times the tolerance of the logits."""


@dataclass(frozen=True)
class _Call:
    """One packed call: its arguments, and where in the batch each document lies and at which position it begins."""

    arguments: dict[str, Any]
    spans: list[tuple[int, int, int]]
    first: list[int]


def _default(case: _Case) -> _Call:
    return case.one_row(position_ids=True)


def _no_cache(case: _Case) -> _Call:
    return case.one_row(position_ids=True, use_cache=False)


def _all_ones_mask(case: _Case) -> _Call:
    return case.one_row(position_ids=True, mask="ones")


def _padding_mask(case: _Case) -> _Call:
    return case.one_row(position_ids=True, mask="padding", padding=3)


def _segment_ids(case: _Case) -> _Call:
    return case.one_row(position_ids=False, mask="segments")


def _two_rows(case: _Case) -> _Call:
    return case.two_rows()


def _mid_document(case: _Case) -> _Call:
    return case.one_row(position_ids=True, offset=5)


MODES = {
    "default": _default,
    "use_cache=False": _no_cache,
    "all-ones mask": _all_ones_mask,
    "padding mask": _padding_mask,
    "segment ids": _segment_ids,
    "two rows": _two_rows,
    "mid-document start": _mid_document,
}


class _Case:
    """Random documents for one model, and the packed calls made of them."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], seed: int):
        self.device = api.device_of(model)
        vocabulary = _vocabulary(model)
        self.base = first_position(model.config)
        generator = torch.Generator().manual_seed(seed)
        special = {t for t in _special_tokens(model.config) if isinstance(t, int)}
        allowed = torch.tensor([t for t in range(min(vocabulary, 4096)) if t not in special] or [0])
        count = sum(lengths)

        def draw() -> list[torch.Tensor]:
            tokens = allowed[torch.randint(len(allowed), (count,), generator=generator)]
            return list(tokens.to(self.device).split(list(lengths)))

        self.lengths = lengths
        self.documents, self.others = draw(), draw()

    def _positions(self, offset: int) -> tuple[torch.Tensor, list[int]]:
        first = [self.base + (offset if i == 0 else 0) for i in range(len(self.lengths))]
        pieces = [torch.arange(a, a + n, device=self.device) for a, n in zip(first, self.lengths, strict=True)]
        return torch.cat(pieces)[None], first

    def one_row(
        self,
        position_ids: bool,
        mask: str | None = None,
        padding: int = 0,
        offset: int = 0,
        use_cache: bool | None = None,
    ) -> _Call:
        positions, first = self._positions(offset)
        bounds = np.cumsum([0, *self.lengths]).tolist()
        spans = [(0, a, b) for a, b in pairwise(bounds)]
        arguments: dict[str, Any] = {}
        pad = torch.arange(self.base, self.base + padding, device=self.device)[None]
        if position_ids:
            arguments["position_ids"] = torch.cat([positions, pad], dim=1)
        if mask == "segments":
            numbers = [torch.full((n,), i + 1, device=self.device) for i, n in enumerate(self.lengths)]
            arguments["attention_mask"] = torch.cat(numbers)[None]
        elif mask is not None:
            ones = torch.ones_like(positions)
            arguments["attention_mask"] = torch.cat([ones, torch.zeros_like(pad)], dim=1)
        if use_cache is not None:
            arguments["use_cache"] = use_cache
        return _Call(arguments, spans, first)

    def two_rows(self) -> _Call:
        """The documents in order in the first row, reversed in the second: two layouts of one width."""
        one = self.one_row(position_ids=True)
        order = list(range(len(self.lengths)))[::-1]
        bounds = np.cumsum([0, *(self.lengths[i] for i in order)]).tolist()
        second = {i: (1, a, b) for i, a, b in zip(order, bounds, bounds[1:], strict=False)}
        positions = torch.cat([torch.arange(self.base, self.base + self.lengths[i], device=self.device) for i in order])
        arguments: dict[str, torch.Tensor | bool] = {
            "position_ids": torch.stack([one.arguments["position_ids"][0], positions])
        }
        spans = [*one.spans, *(second[i] for i in range(len(order)))]
        return _Call(arguments, spans, [*one.first, *one.first])

    def inputs(self, call: _Call, replaced: int | None = None) -> torch.Tensor:
        """Token ids (rows, columns) of a call, with one document's tokens replaced where asked."""
        rows = 1 + max(row for row, _, _ in call.spans)
        mask = call.arguments.get("attention_mask")
        columns = mask.shape[1] if isinstance(mask, torch.Tensor) else max(end for _, _, end in call.spans)
        ids = torch.full((rows, columns), int(self.documents[0][0]), device=self.device)
        for number, (row, first, end) in enumerate(call.spans):
            source = self.others if number == replaced else self.documents
            ids[row, first:end] = source[number % len(self.documents)]
        return ids


def _vocabulary(model: PreTrainedModel) -> int:
    """Tokens that can both be read and be predicted."""
    sizes: list[int] = []
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        each = list(embedding) if isinstance(embedding, nn.ModuleList) else [embedding]  # one per codebook
        sizes += [len(e.weight) for e in each if isinstance(getattr(e, "weight", None), torch.Tensor)]  # type: ignore[arg-type]
    if not sizes:
        raise UnsupportedModel(
            f"{type(model).__name__} has no single token embedding, so the auditor has no tokens for it"
        )
    return min(sizes)


def _special_tokens(config: Any) -> Iterator[Any]:
    for name, value in {**vars(config), **getattr(config.get_text_config(), "__dict__", {})}.items():
        if name.endswith(("token_id", "token_index")):
            yield from value if isinstance(value, list) else [value]
    codes = getattr(config, "vocabulary_map", None) or {}  # Chameleon forbids the codes of images as predictions
    yield from (token for name, token in codes.items() if name.startswith("IMGIMG"))


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
        gradients: Whether to compare the gradients of all trainable parameters; costs three times their memory.
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
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(base).__name__} is an encoder-decoder, which the auditor cannot run yet")
    results: list[ModeResult] = []
    left_out: dict[str, str] = {}
    with _left_as_found(base):
        case = _Case(base, lengths, seed)
        for name in modes or MODES:
            for train in training:
                base.train(train)
                try:
                    results.append(_run_mode(base, case, name, train, gradients))
                except _NoReference as reason:
                    left_out[name] = str(reason)
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    return LeakReport(
        model=f"{type(base).__name__} ({base.config.model_type})",
        implementation=str(getattr(base.config, "_attn_implementation", None) or "eager"),
        enabled=api.is_enabled(base),
        dtype=str(dtype).removeprefix("torch."),
        lengths=lengths,
        tolerance=TOLERANCE.get(dtype, 1e-4),
        gradient_tolerance=_GRADIENT_FACTOR * TOLERANCE.get(dtype, 1e-4),
        loss_tolerance=max(_LOSS_TOLERANCE, _GRADIENT_FACTOR * TOLERANCE.get(dtype, 1e-4)),
        results=results,
        left_out=left_out,
    )


class _NoReference(Exception):
    """A document alone that starts at a position of its own cannot be run, so there is nothing to compare with."""


def _run_mode(model: PreTrainedModel, case: _Case, name: str, train: bool, gradients: bool) -> ModeResult:
    call = MODES[name](case)
    try:
        try:
            alone = [_alone(model, case, call, i, None) for i in range(len(call.spans))]
        except Exception as failure:
            if not any(call.first):
                raise
            raise _NoReference(f"{type(failure).__name__}: {failure}") from failure
        packed = _logits(model(input_ids=case.inputs(call), **call.arguments))
        scale = float(torch.cat([a.detach().double().flatten() for a in alone]).std())
        error = max(
            _largest(packed[row, first:end] - alone[i]) / scale for i, (row, first, end) in enumerate(call.spans)
        )
        influence = _influence(model, case, call, packed, scale)
        gradient = _gradient_error(model, case, call) if gradients else None
        loss = _loss_error(model, case, call)
    except _NoReference:
        raise
    except Exception as failure:
        return ModeResult(name, train, failure=f"{type(failure).__name__}: {failure}")
    return ModeResult(name, train, error=error, influence=influence, gradient=gradient, loss=loss)


def _logits(output: Any) -> torch.Tensor:
    for field in ("logits", "last_hidden_state"):
        value = getattr(output, field, None)
        if isinstance(value, torch.Tensor):
            return value
    return output[0]


def _alone(model: PreTrainedModel, case: _Case, call: _Call, number: int, labels: bool | None) -> Any:
    """One document by itself: its logits, or the whole output where labels are given."""
    document = case.documents[number % len(case.documents)][None]
    arguments: dict[str, Any] = {}
    if call.first[number] != 0:
        first = call.first[number]
        arguments["position_ids"] = torch.arange(first, first + document.shape[1], device=case.device)[None]
    for rotary in row_dependent_rotaries(model):
        reset_frequencies(rotary, _rotary_call(model, rotary, case.device))
    if labels:
        return model(input_ids=document, labels=_as_labels(model, document), use_cache=False, **arguments)
    return _logits(model(input_ids=document, use_cache=False, **arguments))[0]


def _as_labels(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Models of audio codes have one label per codebook: (rows, columns, codebooks)."""
    codebooks = model.get_input_embeddings()
    return tokens[..., None].expand(-1, -1, len(codebooks)) if isinstance(codebooks, nn.ModuleList) else tokens


def _rotary_call(model: PreTrainedModel, rotary: nn.Module, device: torch.device) -> dict[str, Any]:
    zero = torch.zeros(1, 1, dtype=torch.long, device=device)
    call = {"x": torch.zeros(1, device=device), "position_ids": zero}
    kinds = rotary.__dict__.get("rope_type")
    return {**call, "layer_type": next(iter(kinds))} if isinstance(kinds, dict) else call


def _largest(difference: torch.Tensor) -> float:
    value = float(difference.detach().abs().max())
    return value if np.isfinite(value) else float("inf")


@torch.no_grad()
def _influence(model: PreTrainedModel, case: _Case, call: _Call, packed: torch.Tensor, scale: float) -> np.ndarray:
    """influence[i, j]: change of document i's logits when document j is replaced, relative; NaN on the diagonal."""
    count = len(call.spans)
    matrix = np.full((count, count), np.nan)
    for j in range(count):
        changed = _logits(model(input_ids=case.inputs(call, replaced=j), **call.arguments))
        for i, (row, first, end) in enumerate(call.spans):
            if i != j:
                matrix[i, j] = _largest(changed[row, first:end] - packed[row, first:end]) / scale
    return matrix


def _gradient_error(model: PreTrainedModel, case: _Case, call: _Call) -> float | None:
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

    alone = [_alone(model, case, call, i, None) for i in range(len(call.spans))]
    chosen = [weights(a) for a in alone]
    try:
        expected = _grad(alone, chosen, parameters)
    except Exception:
        if model.training:
            raise
        return None  # some models have gradients in train mode alone
    packed = _logits(model(input_ids=case.inputs(call), **call.arguments))
    parts = [packed[row, first:end] for row, first, end in call.spans]
    found = _grad(parts, chosen, parameters)
    overall = max(float(e.abs().max()) for e in expected)
    return max(
        _largest(f - e) / max(float(e.abs().max()), 1e-2 * overall) for f, e in zip(found, expected, strict=True)
    )


def _grad(
    logits: list[torch.Tensor], weights: list[torch.Tensor], parameters: list[nn.Parameter]
) -> list[torch.Tensor]:
    """Gradient of a weighted sum of all logits."""
    total = torch.stack([(a * w).sum() for a, w in zip(logits, weights, strict=True)]).sum()
    grads = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]


def _loss_error(model: PreTrainedModel, case: _Case, call: _Call) -> float | None:
    """Relative difference of the model's own loss: packed against the mean over all tokens of the documents alone."""
    if type(model).__name__ not in upstream.causal_lm_class_names():
        return None
    ids = case.inputs(call)
    labels = torch.full_like(ids, -100)
    skipped = int(shifts_labels(model))  # a loss that shifts never uses the first label of a document
    # Stock, the caller has to mask it, as every collator for packing does; enabled, that is left to autopack.
    masked = 0 if api.is_enabled(model) else skipped
    for row, first, end in call.spans:
        labels[row, first + masked : end] = ids[row, first + masked : end]
    counts = [end - first - skipped for _, first, end in call.spans]
    if not any(counts):
        return None  # documents of one token predict nothing
    with torch.no_grad():
        try:
            found = model(input_ids=ids, labels=_as_labels(model, labels), **call.arguments).loss
        except UnsupportedModel:
            return None  # logits are computed without labels, and with them the call is refused
        total = sum(_alone(model, case, call, i, labels=True).loss.double() * n for i, n in enumerate(counts) if n > 0)
    expected = float(total) / sum(counts)
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


def _is_noise(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return name == "p"
    return any(word in name for word in ("dropout", "layerdrop", "jitter", "drop_path"))
