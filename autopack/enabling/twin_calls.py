"""Ask a twin what a model makes of one kind of call, and compare what two calls of it give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack.auditing.auditor import TOLERANCE
from autopack.enabling.by_twin import parts_outside, precisions_of, with_what_is_on
from autopack.errors import AutopackError
from autopack.inspection.hooks import hooks_of, is_foreign_hook
from autopack.proving import kept
from autopack.proving import twin as twins
from autopack.proving.apart import apart
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel

_GRADIENTS = 10
"""Gradients may differ by so many times as much as outputs: sums over all tokens cancel in them."""
Results = dict[str, torch.Tensor]
MakeTwin = Callable[[], PreTrainedModel]


def why_not(
    model: PreTrainedModel,
    enabled: EnabledModel,
    about: str,
    ask: Callable[[MakeTwin, torch.dtype], str | None],
) -> str | None:
    """Why a model does not serve one kind of call, as a twin says, in words; None where it does.

    `ask` is given a function that makes a twin, and its precision, and returns the reason. What it has said `about` a
    model whose code and hooks are all the library's is kept. Weights of the model have no part in it.
    """
    key = None
    hooked = any(is_foreign_hook(hook) for module in model.modules() for hook in hooks_of(module).values())
    if not enabled.runs_other_code and not hooked:
        key = kept.key_of(model, about, enabled.options.backend, enabled.implementations())
    found = None if key is None else kept.load(key)
    if found is None:
        try:
            found = {"why": apart(lambda: _asked(model, enabled, ask))}
        except NoTwin as error:
            found = {"why": f"no twin of it tells whether it gives the same: {error}"}
        if key is not None:
            kept.store(key, found)
    return found["why"]


def _asked(
    model: PreTrainedModel, enabled: EnabledModel, ask: Callable[[MakeTwin, torch.dtype], str | None]
) -> str | None:
    dtypes, device = precisions_of(model, enabled)
    failure: Exception | None = None
    for dtype in dtypes:

        def make(dtype: torch.dtype = dtype) -> PreTrainedModel:
            twin = with_what_is_on(model, twins.of(model, dtype, device))
            parts_outside(twin, model)  # what the twin has none of has to look at one token at a time
            return twin.model.eval()

        try:
            return ask(make, dtype)
        except AutopackError as error:
            return f"its twin refuses it: {error}".partition(". ")[0]
        except NoTwin:
            raise
        except Exception as error:  # a class may compute nothing at this size, or know no float64
            failure = error
    raise NoTwin(f"it raised {type(failure).__name__}: {failure}")


def difference(found: Results, wanted: Results, dtype: torch.dtype) -> str | None:
    """What two calls give differently, in words; None where that is rounding."""
    if wanted.keys() != found.keys() or not wanted:
        return "its twin gives other outputs"
    for name, value in wanted.items():
        if found[name].shape != value.shape:
            return f"its twin gives {name.partition(' ')[0]} of another shape"
        scale = float(value.abs().max()) if value.numel() else 0.0
        error = float((found[name] - value).abs().nan_to_num(float("inf")).max()) if value.numel() else 0.0
        bound = TOLERANCE[dtype] * (_GRADIENTS if name.startswith("gradient") else 1)
        # What casts to float32 in code of its own rounds as float32 does.
        bound = max(bound, TOLERANCE[torch.float32]) if dtype == torch.float64 else bound
        if error > bound * max(scale, 1e-6):
            return f"its twin gives another {name.partition(' ')[0]}, by {error / max(scale, 1e-6):.0e} of its size"
    return None


def tensors_of(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating outputs of a call that have gradients, by name."""
    for name, value in output.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            yield name, value


def weights_of(shape: tuple[int, ...] | torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Numbers of a shape by which outputs are added up, so that each has a gradient of its own."""
    count = int(torch.Size(shape).numel())
    return torch.linspace(0.5, 1.5, count, device=like.device, dtype=like.dtype).reshape(shape)


def gradients_of(model: PreTrainedModel) -> torch.Tensor:
    """The gradients of all parameters, one after the other; zeros of those that have none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in model.parameters()]
    return torch.cat([each.flatten() for each in found])
