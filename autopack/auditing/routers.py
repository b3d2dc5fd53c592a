"""The losses of routers: packed rows, with and without padding, and padded, beside stock's padded batch.

A router is balanced over all tokens of a batch, so documents alone say nothing of it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from autopack.auditing.cases import FORMS, ROUTER, NoReference
from autopack.auditing.compare import relative_error
from autopack.auditing.measuring import Measuring
from autopack.auditing.report import ModeResult
from autopack.calls.outputs import loss_of, parts_of
from autopack.errors import AutopackError

_WANTED: dict[str, Any] = {"output_router_logits": True}


@torch.no_grad()
def measure_routers(measuring: Measuring) -> ModeResult:
    """Compare all numbers beside results; raise `NoReference` if stock counts padding in them."""
    case, labels, runner = measuring.case, measuring.labels, measuring.runner
    if labels is None:
        raise NoReference("there are no labels that its loss takes")
    batch = case.call(FORMS[ROUTER])
    given, other = (measuring.of_batch(batch, FORMS[ROUTER], filler) | _WANTED for filler in (None, case.other_filler))
    try:
        expected, changed = (_numbers(runner.stock(arguments)) for arguments in (given, other))
    except Exception as error:
        raise NoReference(f"stock raises {type(error).__name__} for the padded batch") from error
    if not expected or not all(map(torch.isfinite, expected.values())):
        raise NoReference("stock gives no numbers for the loss of the padded batch")
    if _error(changed, expected) > 1e-6:
        raise NoReference("stock counts padding in it, so that a padded batch says nothing")
    packed = (case.call(FORMS[name]) for name in ("default", "padding mask"))
    result = partial(ModeResult, ROUTER, measuring.training, error=None)
    worst, refused = 0.0, None
    for arguments in [*(case.given(call) | labels.packed(call) | _WANTED for call in packed), given]:
        try:
            worst = max(worst, _error(_numbers(runner.model(**arguments)), expected))
        except AutopackError as failure:
            refused = f"{type(failure).__name__}: {failure}"
        except Exception as failure:
            return result(failure=f"{type(failure).__name__}: {failure}")
    return result(loss=worst, loss_refused=refused)


def _numbers(output: Any) -> dict[Any, torch.Tensor]:
    """Return the loss of an output, and all other single numbers in it."""
    parts = {**parts_of(output), "loss": loss_of(output)}
    numbers = {name: value for name, value in parts.items() if isinstance(value, torch.Tensor) and not value.dim()}
    return {name: value for name, value in numbers.items() if value.is_floating_point()}


def _error(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    return max(relative_error(found[name], value) if name in found else math.inf for name, value in expected.items())
