"""Find out whether a model is exact: by what was recorded of this very code, or by an audit of the model itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from autopack.auditing.auditor import TOLERANCE, audit
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.report import LeakReport
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, takes_tokens
from autopack.inspection.provenance import Provenance
from autopack.runtime.model import EnabledModel, Proof
from autopack.runtime.scope import stock
from autopack.trust.recorded import why_not_recorded

logger = logging.getLogger(__name__)

_LENGTHS = (7, 11, 5)
"""Of the documents of an audit on the spot: one has neighbours on both sides, and two have another one between them.

Their sum is a prime, so that columns are not taken for heads or channels of that number."""


def prove(model: PreTrainedModel, enabled: EnabledModel, code: Provenance, packs: bool) -> None:
    """Set the proof of a model that has been attached; `code` says whose code it runs.

    Where somebody looks inside, at rows and columns, padded batches keep theirs, whatever is proven. An audit calls
    such hooks, so it waits until a call `packs` rows.
    """
    if code.hook is not None and not packs and enabled.options.verify == "auto":
        enabled.proof = Proof(f"not yet, but when rows are first packed: {code.hook}", waits=True)
    else:
        _prove(model, enabled, code)
    if code.onlooker is not None and enabled.proof.padded is None and enabled.options.verify != "never":
        enabled.proof = replace(enabled.proof, padded=f"{code.onlooker}, and sees the padded form")


def _prove(model: PreTrainedModel, enabled: EnabledModel, code: Provenance) -> None:
    verify, kind = enabled.options.verify, enabled.anatomy.model_type
    if verify == "never":
        enabled.proof = Proof("not asked for (verify='never')")
        return
    unknown = next(iter(code.foreign), code.hook) or why_not_recorded(model)
    if unknown is None and verify == "auto":
        enabled.proof = Proof(f"by the released leak test of {kind}, in this very code", recorded=True)
        return
    tested = _callable_part(enabled)
    unasked = None
    if tested is not model:
        unasked = f"nobody has seen what the forward of {type(model).__name__} does with padding"
        # What its own forward makes of the part is compared with nothing; it is handed the form that it knows.
        unknown = next(iter(Provenance(tested).foreign), code.hook) or why_not_recorded(tested)
        if unknown is None and verify == "auto":
            how = f"by the released leak test of {kind}, for the {type(tested).__name__} in it"
            enabled.proof = Proof(how, padded=unasked)
            return
    started = time.perf_counter()
    because = unknown if verify == "auto" else "verify='always'"
    logger.log(
        logging.WARNING if verify == "auto" else logging.INFO,
        "autopack audits this %s on the spot, on a few dozen tokens, because no released run has measured it: %s",
        type(model).__name__,
        because,
    )
    try:
        report = _as_float32(audit(tested, lengths=_LENGTHS))
    except Exception as error:
        # Somebody else's code may raise anything; what cannot be measured is not proven.
        reason = f"its audit raised {type(error).__name__}: {error} (audited because: {because})"
        enabled.proof = Proof(f"not: {reason}", reason, reason, reason)
        return
    how = f"by an audit of this very model, worst relative error {report.worst:.1e} (audited because: {because})"
    # A padded batch without its padding is a packed row.
    inexact = report.padded or report.packed
    padded = unasked or (inexact and f"it was not exact without its padding when it was audited: {inexact}")
    packed = report.packed and f"{report.packed} (audited because: {because})"
    recorded = unknown is None and tested is model
    enabled.proof = Proof(how, packed, report.labels, padded, recorded=recorded)
    logger.info("autopack audited %s in %.1f s", type(model).__name__, time.perf_counter() - started)


def _callable_part(enabled: EnabledModel) -> PreTrainedModel:
    """The outermost model inside that can be called with tokens by their name: a forward may have others for them."""
    entries = enabled.anatomy.entries
    for module in entries[:-1]:
        if _is_of_choices(module):
            continue
        token = torch.zeros(1, 1, dtype=torch.long)
        try:
            with left_as_found(module), stock(enabled), torch.no_grad():
                if takes_tokens(module):
                    module(input_ids=token.to(device_of(module)))
                    return module
        except Exception as error:
            # An encoder-decoder wants tokens for both halves: that is what the audit knows how to give.
            if not isinstance(error, TypeError) or "input_ids" not in str(error):
                return module
    return entries[-1]


def _is_of_choices(module: PreTrainedModel) -> bool:
    head = row_head(module)
    return head is not None and head.of_choices


def _as_float32(report: LeakReport) -> LeakReport:
    """Hold a model in float64 to no more than one in float32: a good part of them casts to it in code of its own."""
    least = TOLERANCE[torch.float32] / 10 if report.dtype == "float64" else TOLERANCE[torch.float32]
    return replace(
        report,
        tolerance=max(report.tolerance, least),
        gradient_tolerance=max(report.gradient_tolerance, 10 * least),
        loss_tolerance=max(report.loss_tolerance, 10 * least),
        padded_tolerance=max(report.padded_tolerance, least),
    )
