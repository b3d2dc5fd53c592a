"""What a type checker sees of the public surface: `mypy` reads this file, and nothing runs it.

An ignored error is one that has to be there: mypy warns of those that are not.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import assert_type

import autopack
from autopack.auditing.report import LeakReport
from autopack.enabling.handle import Handle


def enabled(model: nn.Module) -> None:
    with autopack.enable(model, backend="auto", check_every=500) as handle:
        assert_type(handle.backend, str)
    assert_type(autopack.is_enabled(model), bool)
    autopack.enable(model, backend=3)  # type: ignore[arg-type]
    autopack.enable(model, unpad="never")  # type: ignore[arg-type]
    autopack.enable(model, watch=500)  # type: ignore[call-arg]
    assert_type(autopack.enable([model], verify="strict"), Handle)


def audited(model: Any) -> None:
    report = autopack.audit(model)
    assert_type(report, LeakReport)
    assert_type(report.exact, bool)
    assert_type(report.packed, str | None)
    report.exakt  # type: ignore[attr-defined]  # noqa: B018


def packed(model: Any, lengths: list[int]) -> None:
    plan = autopack.packing.plan(lengths, 4096, "sequential")
    assert_type(plan, autopack.packing.Plan)
    assert_type(plan.fill, float)
    assert_type(autopack.PackingCollator.for_model(model), autopack.PackingCollator)
    autopack.packing.plan(lengths, "4096")  # type: ignore[arg-type]
    autopack.packing.plan(lengths, 4096, "best")  # type: ignore[arg-type]
    autopack.PackedBatchSampler(lengths, 4096, overflow="cut")  # type: ignore[arg-type]
