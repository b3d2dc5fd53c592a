"""The loss with that of a mixture's router: of packed rows and unpadded batches, against stock on the padded batch."""

from __future__ import annotations

from typing import Any

import torch

from autopack.auditing.asking import loss_of
from autopack.auditing.cases import MODES, Case, NoReference
from autopack.auditing.fields import Sides
from autopack.auditing.losses import Labels, relative_error
from autopack.auditing.report import ROUTER, ModeResult
from autopack.auditing.running import Runner
from autopack.errors import AutopackError

_WANTED = {"output_router_logits": True}


@torch.no_grad()
def measure_router(runner: Runner, case: Case, labels: Labels | None, pads: bool) -> ModeResult:
    """Every number that a model gives beside its results, packed with padding and without, and padded where it `pads`.

    A router is balanced over all tokens of a batch, so documents alone say nothing of it. Raises `NoReference` where
    stock counts padding in it.
    """
    training = runner.model.training
    if labels is None:
        raise NoReference("there are no labels that its loss takes")
    given = _padded(case, labels)
    try:
        expected = _numbers(runner.stock(given))
        changed = _numbers(runner.stock(_padded(case, labels, case.other_filler)))
    except Exception as error:
        raise NoReference(f"stock raises {type(error).__name__} for the padded batch") from error
    if not expected:
        raise NoReference("stock gives no loss for the padded batch")
    if _error(changed, expected) > 1e-6:
        raise NoReference("stock counts padding in it, so that a padded batch says nothing")
    calls = [
        {**case.given(call), **labels.packed(call)} for call in (MODES[n](case) for n in ("default", "padding mask"))
    ]
    worst, refused = 0.0, None
    for call in [*calls, *([given] if pads else [])]:
        try:
            worst = max(worst, _error(_numbers(runner.run(**{**call, **_WANTED})), expected))
        except AutopackError as failure:
            refused = f"{type(failure).__name__}: {failure}"
        except Exception as failure:
            return ModeResult(ROUTER, training, failure=f"{type(failure).__name__}: {failure}")
    return ModeResult(ROUTER, training, None, None, None, worst, loss_refused=refused)


def _padded(case: Case, labels: Labels, filler: int | None = None) -> dict[str, Any]:
    padded: dict[str, Any] = dict(case.padded(filler=filler))
    return {**padded, **labels.padded(Sides.of_padded_batch(padded)), **_WANTED}


def _numbers(output: Any) -> dict[str, torch.Tensor]:
    """The loss of an output, and all other single numbers in it."""
    pairs = output.items() if isinstance(output, dict) else enumerate(output) if isinstance(output, tuple) else ()
    found = {
        str(name): value
        for name, value in pairs
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.dim()
    }
    loss = loss_of(output)
    return found if loss is None else {**found, "loss": loss}


def _error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    if found.keys() < expected.keys():
        return float("inf")
    return max(relative_error(found[name], value) for name, value in expected.items())
