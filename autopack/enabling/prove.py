"""Find out whether a model is exact: by what was recorded of this very code, or by an audit of the model itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from transformers import PreTrainedModel

from autopack.auditing.auditor import audit
from autopack.auditing.budget import Budget, OverBudget, budget_of
from autopack.auditing.within import audit_within, words_of
from autopack.enabling.by_twin import proof_by_twin
from autopack.enabling.reading import LENGTHS, as_float32, callable_part, is_in_its_head, why_padding_is_unknown
from autopack.inspection.provenance import Provenance
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel, Proof
from autopack.trust.recorded import why_not_recorded

logger = logging.getLogger(__name__)
BUDGET: Budget | None = None
"""Of an audit of somebody's own model, unless `verify` is "full"; None leaves it to the size of the model."""


def prove(
    model: PreTrainedModel, enabled: EnabledModel, code: Provenance, packs: bool, on_one_rank: bool = False
) -> None:
    """Set the proof of a model that has been attached; `code` says whose code it runs.

    Where somebody looks inside, at rows and columns, padded batches keep theirs, whatever is proven. An audit calls
    such hooks, so it waits until a call `packs` rows. An audit of the model itself `on_one_rank` of several, which
    gather its parameters together, would wait for the others for ever: it is not made.
    """
    enabled.runs_other_code = code.runs_other_code and enabled.options.verify != "never"
    if code.hook is not None and not packs and enabled.options.verify == "auto":
        enabled.proof = Proof(f"not yet, but when rows are first packed: {code.hook}", waits=True)
    else:
        _prove(model, enabled, code, on_one_rank)
    if code.onlooker is not None and enabled.proof.padded is None and enabled.options.verify != "never":
        enabled.proof = replace(enabled.proof, padded=f"{code.onlooker}, and sees the padded form")


def _prove(model: PreTrainedModel, enabled: EnabledModel, code: Provenance, on_one_rank: bool) -> None:
    verify, kind = enabled.options.verify, enabled.anatomy.model_type
    if verify == "never":
        enabled.proof = Proof("not asked for (verify='never')")
        return
    unknown = next(iter(code.foreign), code.hook) or why_not_recorded(model)
    if unknown is None and verify == "auto":
        enabled.proof = Proof(f"by the released leak test of {kind}, in this very code", source="recorded")
        return
    silent = ""
    if verify == "auto":
        try:
            own = not code.foreign and code.hook is None
            enabled.proof = proof_by_twin(model, enabled, str(unknown), own)
            return
        except NoTwin as error:
            silent = f"; a twin does not tell, for {error}"
    if on_one_rank:
        reason = (
            f"this very model would have to be audited on all ranks that hold a part of its parameters, and nobody "
            f"knows whether the others were changed as well ({unknown}{silent}). Change it on every rank and enable it "
            f"after that"
        )
        enabled.proof = Proof(f"not: {reason}", reason, reason, reason)
        return
    tested = callable_part(enabled)
    unasked = None
    if tested is not model:
        unasked = why_padding_is_unknown(model, tested)
        # What its own forward makes of the part is compared with nothing; it is handed the form that it knows.
        unknown = next(iter(Provenance(tested).foreign), code.hook) or why_not_recorded(tested)
        if unknown is None and verify == "auto":
            how = f"by the released leak test of {kind}, for the {type(tested).__name__} in it"
            enabled.proof = Proof(how, padded=unasked, source="recorded")
            return
    because = f"{unknown}{silent}" if verify == "auto" else f"verify={verify!r}"
    said = ("audit", because, "")
    announce = verify == "auto" and said not in enabled.logged
    enabled.logged.add(said)
    enabled.proof = _audited(
        tested, because, verify, unasked, logging.WARNING if announce else logging.INFO, enabled.anatomy.causal
    )


def _audited(model: PreTrainedModel, because: str, verify: str, unasked: str | None, level: int, causal: bool) -> Proof:
    """What an audit of this very model says: within the budget, or at full depth where `verify` asks for it.

    `unasked` is why nobody knows what becomes of padding around it, if so; `causal` is a model whose tokens see none
    that follow. It is announced at a `level` of logging.
    """
    started = time.perf_counter()
    said = f"(audited because: {because})"
    logger.log(
        level,
        "autopack audits this %s on the spot, on a few dozen tokens, because no released run has measured it: %s",
        type(model).__name__,
        because,
    )
    budget = BUDGET or budget_of(model)
    within, left = "", ""
    try:
        if verify == "full":
            report = as_float32(audit(model, lengths=LENGTHS))
        else:
            found = audit_within(model, budget, LENGTHS)
            report, within = as_float32(found.report), f" within {budget}"
            left = f"; left out: {words_of(found.left_out)}" if found.left_out else ""
    except OverBudget as spent:
        reason = (
            f"an audit of this very model within {budget} could not tell, since {spent}; verify='full' audits it "
            f"whatever that takes {said}"
        )
        return Proof(f"not: {reason}", reason, reason, reason)
    except Exception as error:
        # Somebody else's code may raise anything; what cannot be measured is not proven.
        reason = f"its audit raised {type(error).__name__}: {error} {said}"
        return Proof(f"not: {reason}", reason, reason, reason)
    how = f"by an audit of this very model{within}, worst relative error {report.worst:.1e} {said}{left}"
    # A padded batch without its padding is a packed row, unless the head gets it back as it came.
    inexact = report.padded or (None if is_in_its_head(model, report, causal) else report.packed)
    padded = unasked or (inexact and f"it was not exact without its padding when it was audited: {inexact}")
    packed = report.packed and f"{report.packed} {said}"
    logger.info("autopack audited %s in %.1f s", type(model).__name__, time.perf_counter() - started)
    return Proof(how, packed, report.labels, padded, source="audit")
