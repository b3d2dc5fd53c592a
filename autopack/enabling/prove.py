"""Find out whether a model is exact: by what was recorded of this very code, or by an audit of the model itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from autopack.auditing.auditor import TOLERANCE, audit
from autopack.auditing.report import LeakReport
from autopack.inspection.provenance import Provenance
from autopack.runtime.model import EnabledModel, Proof
from autopack.trust.recorded import why_not_recorded

logger = logging.getLogger(__name__)


def prove(model: PreTrainedModel, enabled: EnabledModel, code: Provenance) -> None:
    """Set the proof of a model that has been attached; `code` says whose code it runs."""
    verify = enabled.options.verify
    if verify == "never":
        enabled.proof = Proof("not asked for (verify='never')")
        return
    if verify == "auto":
        unknown = f"{code.foreign[0]}" if code.foreign else why_not_recorded(model)
        if unknown is None:
            enabled.proof = Proof(f"by the released leak test of {enabled.anatomy.model_type}, in this very code")
            return
    else:
        unknown = "verify='always'"
    started = time.perf_counter()
    report = _as_float32(audit(model))
    how = f"by an audit of this very model, worst relative error {report.worst:.1e} (audited because: {unknown})"
    reason = None if report.exact else report.worst_case
    enabled.proof = Proof(
        how, getattr(report, "packed", reason), getattr(report, "labels", None), getattr(report, "padded", None)
    )
    logger.info("autopack audited %s in %.1f s: %s", type(model).__name__, time.perf_counter() - started, unknown)


def _as_float32(report: LeakReport) -> LeakReport:
    """Hold a model in float64 to no more than one in float32: a good part of them casts to it in code of its own."""
    least = TOLERANCE[torch.float32]
    return replace(
        report,
        tolerance=max(report.tolerance, least),
        gradient_tolerance=max(report.gradient_tolerance, 10 * least),
        loss_tolerance=max(report.loss_tolerance, 10 * least),
    )
