"""Look at a model, attach to it and prove it exact: by a twin, or else by an audit.

And again where it is no longer what it was.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from autopack import registry
from autopack.auditing.budget import Budget, OverBudget, budget_of
from autopack.auditing.within import audit_within, words_of
from autopack.enabling import twin_calls
from autopack.enabling.attach import attach, look_at, remove_hooks, strip_severed
from autopack.enabling.by_twin import first_label_counts_in_twin, proof_by_twin
from autopack.enabling.reading import (
    LENGTHS,
    as_float32,
    callable_part,
    is_in_its_head,
    why_not_left_out,
    why_padding_is_unknown,
)
from autopack.enabling.sites import needed_sites
from autopack.errors import AutopackError
from autopack.family import Family
from autopack.inspection import torches
from autopack.inspection.changes import Watch
from autopack.inspection.provenance import Provenance
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel, Proof
from autopack.runtime.scope import MARK

logger = logging.getLogger(__name__)
BUDGET: Budget | None = None
"""Of an audit of the user's own model; None leaves it to the size of the model."""


def renew(enabled: EnabledModel, packs: bool, proves: bool) -> None:
    """Look at an enabled model again, which is no longer what it was: mark and hook what it is now, and prove that.

    `packs` says that a call has brought packed rows, for which some of the proof may have waited.
    `proves` says that the model may be proven in this call.

    What cannot be proven is refused by later calls; padded batches then stay as they come.
    """
    model, before = enabled.anatomy.entries[0], enabled.anatomy
    # Hooks are what people put on one rank alone; layers are replaced and wrapped on all of them.
    waits = enabled.proof.waits and enabled.proof.packed is None
    only_hooks = waits or (enabled.watch is not None and enabled.watch.only_hooks())
    enabled.watch = None  # until it is settled: after an interrupt the next call looks at it again
    if enabled.live is not None:
        enabled.live.begin_anew()
    try:
        strip_severed(model)  # layers that were copied and put into the model
        family = registry.family_for(model)
        anatomy, traits = look_at(model, family)
        for module in [*before.mixing, *before.indifferent]:
            module.__dict__.pop(MARK, None)
        inside = set(map(id, anatomy.entries))
        for module in before.entries:
            if id(module) not in inside:
                remove_hooks(module)  # it was taken out of the model
        enabled.anatomy, enabled.traits = anatomy, traits
        enabled.lease.renew(partial(needed_sites, enabled.anatomy, family.sites))
        settle(model, enabled, family, packs, on_one_rank=only_hooks and bool(enabled.groups), proves=proves)
    except AutopackError as error:
        reason = f"it was changed after it had been enabled, and cannot be served any more: {error.message}"
        enabled.proof = _unproven(reason)


def settle(
    model: PreTrainedModel,
    enabled: EnabledModel,
    family: Family,
    packs: bool = False,
    on_one_rank: bool = False,
    proves: bool = True,
) -> None:
    """Attach to a model and prove it, unless a later call `proves` it; from then on it is watched.

    Where it may be `on_one_rank` alone, of several that gather its parameters together, the model itself is not run.
    """
    # Asked when rows first begin alike, ranks first share them or media first come, and then of what the model is.
    enabled.prefixes_proven_by, enabled.parts_proven_by = twin_calls.why_not_prefixes, twin_calls.why_not_parts
    enabled.media_proven_by = twin_calls.why_not_media
    enabled.said_by_twins = {}
    with enabled.settling():
        enabled.proof = Proof("not yet")  # what it was refused for must not refuse the calls of its audit
        # Of labels nothing is known either until it is proven.
        ask = partial(first_label_counts_in_twin, model) if proves else lambda level: True
        code = attach(model, enabled, family, ask)
        enabled.runs_other_code = code.runs_other_code and bool(enabled.options.verify)
        enabled.unknown_code = code.unknown
        if proves:
            _prove(model, enabled, code, packs, on_one_rank)
        else:
            enabled.proof = _waiting("it is proven in the next call that is not one of generation")
        enabled.watch = Watch(model, code, enabled.anatomy.configs, enabled.changes)


def _prove(model: PreTrainedModel, enabled: EnabledModel, code: Provenance, packs: bool, on_one_rank: bool) -> None:
    """Set the proof of a model that has been attached; `code` says whose code it runs.

    Where somebody looks inside, at rows and columns, padded batches keep theirs, whatever is proven. An audit calls
    such hooks, so it waits until a call `packs` rows. An audit of the model itself `on_one_rank` of several, which
    gather its parameters together, would wait for the others for ever: it is not made.
    """
    verify = enabled.options.verify
    if code.hook is not None and not packs and verify:
        enabled.proof = Proof(f"not yet, but when rows are first packed: {code.hook}", waits=True)
    else:
        enabled.proof = _proof(model, enabled, code, on_one_rank)
    if verify == "strict" and enabled.proof.source != "twin":
        enabled.proof = _unproven(f"no twin proves the whole of it ({enabled.proof.packed or enabled.proof.how})")
    left_out = ", ".join(enabled.proof.leaves_out)
    if left_out and left_out not in enabled.logged:
        enabled.logged.add(left_out)
        logger.warning(
            "packed calls of %s return None for %s: nobody can tell what of it belongs to which document. Call "
            "documents alone, one in each row, to get it.",
            type(model).__name__,
            left_out,
        )
    if code.onlooker is not None and enabled.proof.padded is None and verify:
        enabled.proof = replace(enabled.proof, padded=f"{code.onlooker}, and sees the padded form")


def _proof(model: PreTrainedModel, enabled: EnabledModel, code: Provenance, on_one_rank: bool) -> Proof:
    if not enabled.options.verify:
        return Proof("not asked for (verify=False)")
    foreign = next(iter(code.foreign), code.hook)
    try:
        return proof_by_twin(model, enabled, foreign)
    except NoTwin as error:
        because = "; ".join(filter(None, (foreign, f"a twin does not tell, for {error}")))
    if enabled.options.verify == "strict":
        return _unproven(because)
    if on_one_rank:
        reason = (
            f"this very model would have to be audited on all ranks that hold a part of its parameters, and nobody "
            f"knows whether the others were changed as well ({because}). Change it on every rank and enable it after "
            f"that"
        )
        return _unproven(reason)
    if torches.is_recorded():
        return _waiting(
            f"this very model has to be audited, which cannot be done inside a transform of torch.func, a trace or a "
            f"graph. Call it once outside of these ({because})"
        )
    tested = callable_part(enabled)
    unasked = None
    if tested is not model:
        # What its own forward makes of the part is compared with nothing; it is handed the form that it knows.
        unasked = why_padding_is_unknown(model, tested)
        foreign = next(iter(Provenance(tested).foreign), code.hook)
        if foreign is None:
            with contextlib.suppress(NoTwin):
                found = proof_by_twin(tested, enabled, None)
                how = f"{found.how}, for the {type(tested).__name__} in it ({because})"
                return replace(found, how=how, padded=unasked or found.padded)
    level = logging.INFO if because in enabled.logged else logging.WARNING
    enabled.logged.add(because)
    return _audited(tested, because, unasked, level, enabled.anatomy.causal, tested is model)


def _waiting(reason: str) -> Proof:
    return replace(_unproven(reason), how=f"not yet: {reason}", waits=True)


def _unproven(reason: str) -> Proof:
    return Proof(f"not: {reason}", reason, reason, reason)


def _audited(
    model: PreTrainedModel, because: str, unasked: str | None, level: int, causal: bool, is_whole: bool
) -> Proof:
    """What an audit of this very model within its budget says.

    `unasked` is why nobody knows what becomes of padding around it, if so; `causal` is a model whose tokens see none
    that follow; `is_whole` that it is no part of the one that is enabled. It is announced at a `level` of logging.
    """
    started = time.perf_counter()
    said = f"(audited because: {because})"
    logger.log(
        level,
        "autopack audits this %s on the spot, on a few dozen tokens: %s",
        type(model).__name__,
        because,
    )
    budget = BUDGET or budget_of(model)
    try:
        found = audit_within(model, budget, LENGTHS)
    except OverBudget as spent:
        reason = (
            f"an audit of this very model within {budget} could not tell, since {spent}; "
            f"autopack.audit(model) audits it whatever that takes, and verify=False goes by that {said}"
        )
        return _unproven(reason)
    except Exception as error:
        # Somebody else's code may raise anything; what cannot be measured is not proven.
        reason = f"its audit raised {type(error).__name__}: {error} {said}"
        return _unproven(reason)
    report = as_float32(found.report)
    left = f"; left out: {words_of(found.left_out)}" if found.left_out else ""
    how = f"by an audit of this very model within {budget}, worst relative error {report.worst:.1e} {said}{left}"
    # A padded batch without its padding is a packed row, unless the head gets it back as it came.
    inexact = report.padded or (None if is_in_its_head(model, report, causal) else report.packed)
    padded = unasked or (inexact and f"it was not exact without its padding when it was audited: {inexact}")
    packed = report.packed or why_not_left_out(report, is_whole)
    packed = packed and f"{packed} {said}"
    logger.info("autopack audited %s in %.1f s", type(model).__name__, time.perf_counter() - started)
    left_out = tuple(sorted(report.unattributed))
    return Proof(how, packed, report.labels, padded, source="audit", leaves_out=left_out)
