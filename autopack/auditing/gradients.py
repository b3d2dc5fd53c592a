"""Gradients of all parameters, whole or as a few random projections of each, and their differences.

A difference D of two gradients of a matrix shows in L D R, with L of 8 rows and R of 8 columns
drawn from a normal distribution. The root mean square of its entries is expected to be the norm of
D. It is less than a tenth of that with a probability below 1e-5, whatever D is (a D of rank one is
the worst: two chi-squared numbers of 8 degrees of freedom both have to be small).

Where autograd multiplies a parameter as a matrix or looks rows up in it, its gradient is A B of two
factors as large as activations, and L A B R needs no matrix of its size. The backward of torch's
own `mm`, `addmm` and `embedding` is known. Any other code's backward is run, and its result
projected as it arrives and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from autopack.inspection.randomness import normal_numbers

_ROUNDINGS = 4


def gradients(total: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradient of every parameter; zero if it has none."""
    # Documents alone are in the graphs of several call modes.
    return list(torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True))


def gradient_error(found: list[torch.Tensor], expected: list[torch.Tensor], beside: float = 0.0) -> float:
    """Return the largest difference of a parameter's gradient, relative to its largest entry."""
    apart = [float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)]
    return _worst(apart, [float(e.abs().max()) for e in expected], [e.dtype for e in expected], beside)


def _worst(found: Sequence[float], sizes: Sequence[float], dtypes: Sequence[torch.dtype], beside: float = 0.0) -> float:
    """Return the largest of some differences of gradients, relative to the gradients' sizes.

    0 if there is none, infinite if one is no number. `beside` is the size of a gradient that is not
    among them. Gradients that are zero but for rounding (biases that a softmax or norm cancels)
    count relative to the largest instead. A few roundings of the parameter's own dtype are no
    difference: some models keep single parameters in bfloat16 (Apertus), whatever the dtype of the
    others.
    """
    least = 1e-2 * max([beside, *sizes])
    errors = [
        difference / (max(size, least) or 1.0) - _ROUNDINGS * torch.finfo(dtype).eps
        for difference, size, dtype in zip(found, sizes, dtypes, strict=True)
    ]
    return max([0.0, *errors]) if all(error == error for error in errors) else float("inf")


_RANK = 8
_PASSED = {"TBackward0": True, "ToCopyBackward0": False}
"""Steps of autograd between a parameter and its product; True if the step transposes it."""
_PRODUCTS = {"MmBackward0": (("self", 0), ("mat2", 1)), "AddmmBackward0": (("mat1", 1), ("mat2", 2))}
"""The two factors of a product as autograd names them, and their places among its inputs."""


@dataclass
class Projections:
    """One backward pass's gradients by parameter number: `kept`, `projected` or `left_out`."""

    parameters: Sequence[nn.Parameter]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    projected: dict[int, torch.Tensor] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)

    def are_finite(self) -> bool:
        """Return True if all of them are finite numbers."""
        return all(bool(value.isfinite().all()) for held in (self.kept, self.projected) for value in held.values())

    def is_like(self, other: Projections) -> bool:
        """Return True if they have the shapes of others, and the same distribution over processes.

        FSDP may have gathered a parameter for one backward pass and shared it out again before the
        next.
        """
        pairs = [(self.kept[n], other.kept[n]) for n in self.kept.keys() & other.kept.keys()]
        alike = all(a.shape == b.shape and type(a) is type(b) for a, b in pairs)
        return len(self.parameters) == len(other.parameters) and alike

    def error(self, expected: Projections) -> float:
        """Return the error against expected gradients, as `gradient_error`; projections by norm.

        A gradient that either has left out is not compared.
        """
        kept = sorted(self.kept.keys() & expected.kept.keys())
        projected = sorted(self.projected.keys() & expected.projected.keys())
        norms = [float(expected.projected[n].norm()) / _RANK for n in projected]
        entries = [norm / self.parameters[n].numel() ** 0.5 for n, norm in zip(projected, norms, strict=True)]
        of_kept = gradient_error([self.kept[n] for n in kept], [expected.kept[n] for n in kept], max([0.0, *entries]))
        apart = [float((self.projected[n] - expected.projected[n]).norm()) / _RANK for n in projected]
        return max(of_kept, _worst(apart, norms, [self.parameters[n].dtype for n in projected]))


@dataclass(frozen=True)
class _Use:
    """A product or look-up with a parameter: its input, and True if it is transposed before."""

    node: Any
    place: int
    turned: bool


def projections(total: torch.Tensor, parameters: Sequence[nn.Parameter], kept: int, most: int) -> Projections:
    """Return the gradients of a sum by `parameters`; small ones whole, up to `kept` bytes in all.

    A gradient that has to be made whole and has more than `most` bytes is left out. The parameters'
    `.grad` and hooks that run after accumulation are left alone.
    """
    found, uses = Projections(parameters), _uses(total, parameters)
    numbers = sorted(range(len(parameters)), key=lambda n: (_bytes(parameters[n]), n))
    factored: dict[int, list[_Use]] = {}
    whole: list[int] = []
    for number in numbers:
        parameter = parameters[number]
        kept -= _bytes(parameter)
        if kept >= 0:
            found.kept[number] = torch.zeros_like(parameter)
        elif parameter.dim() == 2 and all(map(_is_known, uses[number])):
            factored[number] = uses[number]
        elif _bytes(parameter) <= most:
            whole.append(number)
        else:
            found.left_out.add(number)
    found.projected = {number: _nothing(parameters[number]) for number in (*factored, *whole)}
    edges = list({use.node: GradientEdge(use.node, 0) for each in factored.values() for use in each}.values())
    asked: list[Any] = [*edges, *(parameters[number] for number in (*found.kept, *whole))]
    if not asked:
        return found

    def projecting(number: int) -> Any:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            found.projected[number] += _of_whole(gradient.detach(), number)
            return gradient.new_zeros(()).expand_as(gradient)  # autograd would hold it until the end of the pass

        return hook

    handles = [parameters[number].register_hook(projecting(number)) for number in whole]
    try:
        # Documents alone are in the graphs of several call modes.
        gradients = torch.autograd.grad(total, asked, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    arrived = {edge.node: gradient for edge, gradient in zip(edges, gradients, strict=False)}
    for number, gradient in zip(found.kept, gradients[len(edges) :], strict=False):
        if gradient is not None:
            found.kept[number] = gradient
    with torch.no_grad():
        for number, those in factored.items():
            for use in those:
                if arrived[use.node] is not None:
                    found.projected[number] += _of_factors(use, arrived[use.node], parameters[number], number)
    return found


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _uses(total: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[list[_Use]]:
    """Return each parameter's uses on the way to a sum."""
    above: dict[Any, list[tuple[Any, int]]] = {}
    leaves: dict[int, Any] = {}
    waiting: list[Any] = [total.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = node
        for place, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            above.setdefault(child, []).append((node, place))
            if child not in seen:
                seen.add(child)
                waiting.append(child)

    def reached(node: Any, turned: bool) -> Iterator[_Use]:
        for parent, place in above.get(node, ()):
            passed = _PASSED.get(parent.name())
            if passed is None:
                yield _Use(parent, place, turned)
            else:
                yield from reached(parent, turned != passed)

    return [list(reached(leaves[id(p)], False)) if id(p) in leaves else [] for p in parameters]


def _is_known(use: _Use) -> bool:
    name = use.node.name()
    if name == "EmbeddingBackward0":
        return use.place == 0 and not use.turned and not use.node._saved_scale_grad_by_freq
    return any(use.place == place for _, place in _PRODUCTS.get(name, ()))


def _sides(shape: Sequence[int], number: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient's projections by its shape: left (rank, rows), right (columns, rank)."""
    (rows, columns), generator = shape, torch.Generator().manual_seed(number)
    left, right = normal_numbers((_RANK, rows), generator), normal_numbers((columns, _RANK), generator)
    return left.to(like.device, _wide(like)), right.to(like.device, _wide(like))


def _wide(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_RANK, _RANK, device=parameter.device, dtype=_wide(parameter))


def _of_whole(gradient: torch.Tensor, number: int) -> torch.Tensor:
    matrix = gradient.to_dense() if gradient.is_sparse else gradient
    matrix = matrix.reshape(len(matrix), -1) if matrix.dim() > 1 else matrix.reshape(1, -1)
    left, right = _sides(matrix.shape, number, matrix)
    # In pieces: half precision is widened.
    pieces = zip(matrix.split(1024), left.split(1024, dim=1), strict=True)
    total = torch.zeros(_RANK, _RANK, device=matrix.device, dtype=left.dtype)
    for piece, beside in pieces:
        total += beside @ (piece.to(left.dtype) @ right)
    return total


def _of_factors(use: _Use, gradient: torch.Tensor, parameter: torch.Tensor, number: int) -> torch.Tensor:
    """Return the projection of a parameter's gradient from one use, given the result's gradient."""
    node = use.node
    left, right = _sides(parameter.shape, number, parameter)
    gradient = gradient.to(left.dtype)
    if node.name() == "EmbeddingBackward0":
        ids, unused = node._saved_indices.flatten(), node._saved_padding_idx
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if 0 <= unused < len(parameter):
            gradient = gradient * (ids != unused)[:, None]
        return left[:, ids] @ (gradient @ right)
    (first, _), (second, at_second) = _PRODUCTS[node.name()]
    scale = float(getattr(node, "_saved_alpha", 1))
    if use.place == at_second:  # of A P: A' G
        one, other = getattr(node, f"_saved_{first}").T, gradient
    else:  # of P B: G B'
        one, other = gradient, getattr(node, f"_saved_{second}").T
    one, other = one.to(left.dtype), other.to(left.dtype)
    if use.turned:  # it is the gradient of the turned parameter
        one, other = other.T, one.T
    return scale * ((left @ one) @ (other @ right))
