"""What the auditor says of an exhibit, with its defaults and without being told what to look
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import set_seed

import autopack
from compat.museum.exhibit import load

EXACT = "exact"
NOT_MEASURED = "not measured"
"""The word for an audit that is not exact because it could not measure all, and found nothing wrong
in the rest."""

Outcome = dict[str, str | None]
"""What was found in the mistaken one and in its sound twin, and what becomes of a model that is
enabled."""


def measured(name: str) -> Outcome:
    """Return the outcome of an exhibit.

    `found` is the first measurement of the mistaken one that is not exact, in words, `sound` that
    of the twin; None if there is none. A model is also `enabled`: it is exact then, or refused."""
    exhibit = load(name)
    outcome: Outcome = {
        "found": finding(autopack.audit(_made(exhibit.mistaken))),
        "sound": finding(autopack.audit(_made(exhibit.sound))),
    }
    if name.startswith("models."):
        outcome["enabled"] = when_enabled(_made(exhibit.mistaken))
    return outcome


def objection(name: str, outcome: Outcome) -> str | None:
    """Return what is wrong with an outcome, in words; None if it is as it has to be."""
    if outcome["found"] in (None, NOT_MEASURED):
        return "the auditor does not find it"
    if outcome["sound"] is not None:
        return f"an alarm on the sound twin: {outcome['sound']}"
    enabled = outcome.get("enabled") or EXACT
    return (
        None
        if enabled == EXACT or enabled.startswith("refused")
        else f"enabled, it is not exact: {enabled}"
    )


def finding(report: Any) -> str | None:
    """Return the first measurement of an audit that is not exact, without numbers; None if all
    are."""
    if report.exact:
        return None
    rows = getattr(report, "rows", None)
    if rows:  # of a trainer
        wrong = [str(row.measure) for row in rows if row.wrong]
        return wrong[0] if wrong else NOT_MEASURED
    calls = [result for result in report.results if not report.is_exact(result)]
    every = len(calls) == len(report.results)
    return f"{_measure(report, calls[0])}: {'every call' if every else calls[0].name}"


def _measure(report: Any, result: Any) -> str:
    if result.failure is not None:
        return result.failure.partition(":")[0]
    if not (result.error or 0.0) <= report.tolerance:
        return str(result.field or "output")
    bounds = {"gradients": report.gradient_tolerance, "loss": report.loss_tolerance}
    found = {"gradients": result.gradient, "loss": result.loss}
    return next(
        (name for name, value in found.items() if not (value or 0.0) <= bounds[name]), "influence"
    )


def when_enabled(model: Any) -> str:
    """Return "exact" if a model is exact once it is enabled, the code by which it is refused, or
    what is wrong."""
    try:
        autopack.enable(model)
    except autopack.AutopackError as refused:
        return f"refused [{refused.code}]"
    return finding(autopack.audit(model)) or EXACT


def _made(make: Callable[[], Any]) -> Any:
    set_seed(0)
    return make()
