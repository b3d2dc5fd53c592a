"""Run a model as stock, in double precision, or with a hook on every module."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.stateless import _reparametrize_module

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.compare import Arguments, Fields, how_far
from autopack.auditing.fields import Sides, fields_of
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import normal_numbers
from autopack.runtime import scope
from autopack.runtime.marks import enabled_in

_MOST_BYTES = 2**31
"""Largest memory, in bytes, of weights in double precision beside a model's own."""


@contextlib.contextmanager
def stock_again(model: nn.Module) -> Iterator[None]:
    """Run a block as stock, after rotaries have forgotten earlier calls' longest position."""
    enabled = enabled_in(model)
    with contextlib.nullcontext() if enabled is None else scope.stock(enabled):
        forget_lengths(model)
        yield


def run_as_stock(model: nn.Module, arguments: Arguments) -> Any:
    """Return stock's output of a call, unaffected by earlier calls."""
    with stock_again(model):
        return model(**arguments)


@torch.no_grad()
def in_used_tensors(model: nn.Module, arguments: Arguments) -> Arguments:
    """Run the model on reversed rows; return the arguments, copied into the same tensors.

    Programs write batches into the same tensors, for a captured graph or to save memory.
    """
    used = {name: value.flip(0) for name, value in arguments.items() if isinstance(value, Tensor)}
    model(**arguments | used)
    for name, tensor in used.items():
        tensor.copy_(arguments[name])
    return arguments | used


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters that require gradients and are not empty."""
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def gradients_of(sums: Tensor, by: Sequence[Tensor], weights: Tensor | None = None) -> list[Any]:
    """Return gradients of `sums` (by `weights` if several) for the tensors `by`; 0 where unused."""
    # Documents alone are in the graphs of several call modes.
    found = torch.autograd.grad(
        sums, by, weights, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return list(found)


def forget_lengths(model: nn.Module) -> None:
    """Reset rotary frequencies that depend on the longest position of earlier calls, in place."""
    for rotary in row_dependent_rotaries(model):
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> Tensor | None:
    """Return the sum of documents' fields by fixed random weights; None if none has gradients."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for document in documents:
        for name in sorted(document.keys() & scales.keys()):
            value = document[name]
            if value.requires_grad:
                weights = normal_numbers(value.shape, generator).to(value)
                # What stands for minus infinity at padding has no gradient, and would swallow all
                # else.
                shown = value.where(value.detach().abs() < 1e30, torch.zeros_like(value))
                parts.append((shown * weights).sum() / scales[name])
    return torch.stack([part.double() for part in parts]).sum() if parts else None


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most of a model's parameters, by their elements."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def can_be_doubled(model: nn.Module) -> bool:
    """Return True if all weights are plain, whole in this process, uncompiled, and fit in float64.

    Code that is compiled for other weights may come to torch's limit, and run uncompiled from then
    on."""
    weights = list(model.parameters())
    plain = all(
        type(p) is nn.Parameter and not p.is_meta and not hasattr(p, "ds_id") for p in weights
    )
    wrapped = (cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    whole = not any(name.startswith("torch.distributed.") for name in wrapped)
    compiled = any(vars(module).get("_compiled_call_impl") for module in model.modules())
    return plain and whole and not compiled and sum(p.numel() for p in weights) * 8 <= _MOST_BYTES


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Run a block with parameters and buffers in float64, and restore the model's own."""
    doubled = {
        name: nn.Parameter(held.detach().double(), held.requires_grad)
        if isinstance(held, nn.Parameter)
        else held.double()
        for name, held in (*model.named_parameters(), *model.named_buffers())
        if held.is_floating_point()
    }
    with _reparametrize_module(model, doubled, tie_weights=True):
        yield


@contextlib.contextmanager
def listening(hook: Callable[[nn.Module, dict[Any, Any], Any], Any]) -> Iterator[None]:
    """Call `hook(module, arguments, output)` after every module that this thread runs in a block.

    `arguments` are by place or name. It is a global hook of the process: a model would be looked at
    again for one on a module.
    """
    thread = threading.get_ident()

    def called(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        return (
            hook(module, {**dict(enumerate(args)), **kwargs}, output)
            if threading.get_ident() == thread
            else None
        )

    handle = register_module_forward_hook(called, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def first_that_moves(
    model: nn.Module, runs: Sequence[Callable[[], Any]], sides: Sides, touched: np.ndarray
) -> str | None:
    """Return in words the first module that mixes documents, by name and class; None if unknown.

    In the second of two `runs` the documents (documents,) that are `touched` are replaced. The
    module gives the other documents another output from the same input.
    """
    names = {module: name for name, module in model.named_modules()}

    def keep(value: Any) -> Fields:
        """Return copies of the untouched documents' parts of a value."""
        return {
            name: part.clone()
            for name, each in fields_of(value).items()
            if each.dim() > 1 and (part := sides.part(name, each, ~touched)) is not None
        }

    def heard(run: Callable[[], Any]) -> list[tuple[nn.Module, Fields, Fields]]:
        """Return (module, input, output) of each module in a run."""
        found: list[tuple[nn.Module, Fields, Fields]] = []
        with listening(
            lambda module, given, output: found.append((module, keep(given), keep(output)))
        ):
            run()
        return found

    def differs(one: Fields, two: Fields) -> bool | None:
        """Return True if fields differ beyond rounding; None if they are not comparable."""
        if not one or one.keys() != two.keys():
            return None
        return any(how_far(name, one[name], two[name]).excess > 1 for name in one)

    with torch.no_grad(), contextlib.suppress(Exception):  # what mixes is said in any case
        for (module, given, output), (other, *others) in zip(*map(heard, runs), strict=False):
            same_place = module is other and module in names
            if same_place and differs(output, others[1]) and differs(given, others[0]) is False:
                return f"{names[module] or 'the model'}, of the class {type(module).__name__}"
    return None
