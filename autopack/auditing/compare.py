"""Differences between two results, and the bounds below which they are rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Fields = dict[str, Tensor]
"""Tensors of one output, or of one document, by dotted name."""
Arguments = dict[str, Any]
"""Arguments of one call, by name."""


class Bounds(NamedTuple):
    """Largest errors of one precision that count as rounding: of results, gradients and losses."""

    results: float
    """Relative to the standard deviation of a field alone."""
    gradients: float
    """Relative to a parameter's largest: these are sums over tokens and layers."""
    losses: float
    """Relative."""


BOUNDS = {
    torch.float64: Bounds(1e-9, 1e-8, 1e-5),
    torch.float32: Bounds(1e-4, 1e-3, 1e-3),
    torch.float16: Bounds(2e-2, 4e-2, 2e-3),
    torch.bfloat16: Bounds(1e-1, 2e-1, 1e-2),
}
"""Bounds by precision.

In float32 two orders of matrix products differ by about 1e-6 of the logits' scale, and leaks start
near 1e-2: 1e-4 lies well between. float64 leaves 1e-14, but transformers computes losses in
float32. The half precisions keep 11 and 8 bits per operation over the depth of a model. Their
losses are means over tokens, closer than single logits. Their bound of gradients is wide already:
ten times the one of results would let everything pass. """
OF_TWINS = {**BOUNDS, torch.float64: Bounds(1e-4, 1e-4, 1e-4)}
"""Bounds of tiny twins: in float64 a good part of the models casts to float32 in code of its own,
and losses and gradients show a term that is missing. """
ROUNDINGS = 4
"""Roundings of a dtype that are no difference.

Results of unchanged documents may move by so much of a field's largest value: all but three of 256
types stay the same to the bit, two mixtures of experts and Reformer are within it. So may gradients
of parameters of a dtype of their own. """
OF_SHAPES = 0.1
"""Share of the bound of results by which unchanged documents may move as well: convolutions of some
shapes round by their neighbours (Winograd's way), and layers behind them make more of it."""
OTHER_CHOICES = 0.1
"""Share of tokens that may have another whole number, as their likeliest class, by rounding."""
OTHER_EXPERTS = 0.1
"""Median error of tokens up to which rounding may have chosen other experts for a few of them."""
MET = 1e-6
"""Of the largest gradient: a document's gradient by another one is not small, but exactly 0."""
ADDED_UP = 1e-3
"""Of the largest gradient of a parameter: sums of other terms round differently."""
REPLACED = "when other documents were replaced"
"""The other run of a `Difference`, in words, if it is not stock's."""
UNDIVIDED = ", which is no document's,"
"""End of the name of a field that cannot be divided among documents."""
_FEW = 16
"""Least number of values whose spread tells of others of their kind."""
_VALUES = 1 << 20
"""Values to widen at a time: a long document's float64 logits need more memory than the model."""


def bounds_of(dtype: torch.dtype) -> Bounds:
    """Return the bounds of a precision; an unknown precision has the bounds of float32."""
    return BOUNDS.get(dtype, BOUNDS[torch.float32])


def bound_in_use(dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest bound of results among the dtypes in which a call's layers run.

    In float64 alone it is a tenth of float32's: a good part of the models casts to float32 in code
    of its own."""
    return max(
        BOUNDS[torch.float32].results / 10,
        *(bounds_of(each).results for each in [*dtypes] or [torch.float32]),
    )


def scales_of(documents: list[Fields]) -> dict[str, float]:
    """Return each field's unit of error: its `scale_of` all documents, or 1 for whole numbers."""
    return {
        name: scale_of([document[name] for document in documents])
        if value.is_floating_point()
        else 1.0
        for name, value in documents[0].items()
    }


def scale_of(parts: Sequence[Tensor]) -> float:
    """Return the standard deviation of all values of some floating tensors.

    A few values, such as one label of every document, may lie close together by chance; their
    errors are relative to their size too, as rounding is. Stand-ins for minus infinity, as in
    Chameleon's logits of image tokens, do not count.
    """
    count, mean, spread, size = 0, 0.0, 0.0, 0.0
    for chunk in (chunk for part in parts if part.numel() for chunk in _chunks(part)):
        values = chunk[is_sane(chunk, parts[0].dtype)]
        if more := values.numel():
            variance, middle = (float(each) for each in torch.var_mean(values, correction=0))
            apart = middle - mean
            spread += variance * more + apart**2 * count * more / (count + more)
            count, mean = count + more, mean + apart * more / (count + more)
            size = max(size, float(values.abs().max()))
    deviation = math.sqrt(spread / max(count, 1))
    few = math.hypot(deviation, mean) if count < _FEW else 0.0
    return max(deviation, few) or size or 1.0


def is_sane(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of finite numbers that are too small to stand for minus infinity."""
    return values.abs() < torch.finfo(dtype).max / 2


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor (rows, ...) in pieces of some rows, as float64, (rows, values)."""
    flat = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
    for part in flat.split(max(1, _VALUES // max(1, flat.shape[1]))):
        yield part.double()


def errors_between(
    found: list[Fields], expected: list[Fields], scales: Mapping[str, float]
) -> list[tuple[float, str]]:
    """Return (error, field) for each document: its largest error, in units of `scales`."""
    return [
        max(((largest(f[name], e[name]) / scales[name], name) for name in e), default=(0.0, ""))
        for f, e in zip(found, expected, strict=True)
    ]


def largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite at NaN or at unequal infinities."""
    found, expected = found.detach(), expected.detach()
    if not found.is_floating_point():
        found, expected = found.double(), expected.double()
    if not found.numel():
        return 0.0
    value = float(torch.where(found == expected, 0.0, found - expected).abs().max())
    return value if math.isfinite(value) else math.inf


@dataclass(frozen=True)
class Difference:
    """Largest difference of a call from another run: its field, error, tolerance and document."""

    name: str
    error: float = math.inf
    """In standard deviations of the field."""
    tolerance: float = 0.0
    """The error that is allowed, in the same unit."""
    document: int = 0
    """First document that differs."""
    than: str = REPLACED
    """The other run, in words."""
    module: str = ""
    """Module in which it begins, if that is known."""

    @property
    def excess(self) -> float:
        """Error divided by the tolerance: more than 1 is no rounding."""
        return self.error / max(self.tolerance, torch.finfo(torch.float64).tiny)


def how_far(name: str, one: Tensor, two: Tensor) -> Difference:
    """Return the `Difference`, with a tolerance, of two runs' parts of the field `name`."""
    if torch.equal(one, two):
        return Difference(name, 0.0)
    if one.shape != two.shape or not one.is_floating_point():
        return Difference(name, 1.0 if one.shape == two.shape else math.inf)
    nothing, scale = one.isnan() & two.isnan(), scale_of([one])
    error = largest(*(each.masked_fill(nothing, 0.0) for each in (two, one)))
    size = float(torch.where(is_sane(one, one.dtype), one, 0.0).abs().max())
    rounding = ROUNDINGS * torch.finfo(one.dtype).eps * size / scale
    return Difference(name, error / scale, max(rounding, OF_SHAPES * bounds_of(one.dtype).results))


def error_by_token(found: Tensor, expected: Tensor) -> Tensor:
    """Return each token's error in units of the deviation of `expected`, (tokens,).

    It is the root mean square over the channels of a token, in which rounding, other than leaked
    context, does not grow with their number. Infinite where one is no number and the other is. Of
    whole numbers it is 1 where they differ."""
    if not expected.is_floating_point():
        return (found != expected).reshape(len(expected), -1).any(1).double()
    errors = []
    for one, other in zip(_chunks(found), _chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        errors.append((one - other).masked_fill_(same, 0.0).square_().mean(1).sqrt_())
    return torch.cat(errors).nan_to_num(math.inf, posinf=math.inf) / scale_of([expected])


def first_beyond(found: list[Fields], expected: list[Fields], name: str, bound: float) -> str:
    """Return in words the first token whose error in field `name` exceeds `bound`, or ""."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other[name].dim() and other[name].numel():
            errors = error_by_token(one[name], other[name])
            for token in (errors > bound).nonzero()[:1]:
                return f"token {int(token)} of document {number}, off by {float(errors[token]):.1e}"
    return ""


def relative_error(found: Tensor, expected: Tensor, least: float = 1e-12) -> float:
    """Return the relative difference of two losses: 0 if both are NaN, infinite if only one is."""
    one, other = float(found.detach()), float(expected.detach())
    if one == other or (one != one and other != other):
        return 0.0
    error = abs(one - other) / max(abs(other), least)
    return error if math.isfinite(error) else math.inf


def gradient_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of any gradient, relative to that gradient's largest entry.

    0 if there is none, infinite if one is no number. Gradients that are zero but for rounding
    (biases that a softmax or norm cancels) count relative to the largest instead. A few roundings
    of the parameter's own dtype are no difference: some models keep single parameters in bfloat16
    (Apertus), whatever the dtype of the others."""
    sizes = [float(wanted.abs().max()) for wanted in expected]
    least = 1e-2 * max([0.0, *sizes])
    errors = [
        float((one - other).abs().max()) / (max(size, least) or 1.0)
        - ROUNDINGS * torch.finfo(other.dtype).eps
        for one, other, size in zip(found, expected, sizes, strict=True)
    ]
    return max([0.0, *errors]) if all(error == error for error in errors) else math.inf
