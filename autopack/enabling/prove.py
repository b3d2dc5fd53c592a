"""Mark and hook a model and prove it by a twin; again if it has changed.

Calls of a model that has no twin, or runs third-party code, are checked closely
(`autopack.watching`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from autopack import registry
from autopack.enabling import twin_calls
from autopack.enabling.attach import (
    anatomy_and_traits,
    attach,
    needed_sites,
    remove_hooks,
    strip_severed,
)
from autopack.enabling.by_twin import (
    callable_part,
    proof_by_twin,
    why_padding_is_unknown,
)
from autopack.errors import AutopackError
from autopack.family import Family
from autopack.inspection.code import ModelCode
from autopack.inspection.fingerprint import Fingerprint
from autopack.proving import kept
from autopack.proving.twin import NoTwin
from autopack.runtime.marks import MARK
from autopack.runtime.model import EnabledModel, Proof

logger = logging.getLogger(__name__)


def renew(enabled: EnabledModel) -> None:
    """Examine, mark, hook and prove an enabled model again after a change.

    Later calls refuse what cannot be served; padded batches then stay as they come.
    """
    model, before = enabled.module, enabled.anatomy
    # until it is settled: after an interrupt the next call looks at it again
    enabled.fingerprint = None
    if enabled.live is not None:
        enabled.live.begin_anew()
    try:
        strip_severed(model)  # layers that were copied and put into the model
        family = registry.family_for(model)
        anatomy, traits = anatomy_and_traits(model, family)
        for module in [*before.mixing, *before.indifferent]:
            module.__dict__.pop(MARK, None)
        inside = set(map(id, anatomy.entries))
        for module in before.entries:
            if id(module) not in inside:
                remove_hooks(module.modules())  # it was taken out of the model
        enabled.anatomy, enabled.traits = anatomy, traits
        enabled.lease.renew(partial(needed_sites, enabled.anatomy))
        settle(enabled, family)
    except AutopackError as error:
        reason = (
            "it was changed after it had been enabled, and cannot be served any more: "
            f"{error.message}"
        )
        enabled.proof = _unproven(reason)


def settle(enabled: EnabledModel, family: Family) -> None:
    """Mark, hook and prove a model; keep the proof, and a fingerprint that shows changes."""
    # Asked when rows first begin alike, ranks first share them or media first come, and then of
    # what the model is.
    enabled.twin_says, enabled.said_by_twins = twin_calls.why_not, {}
    with enabled.settling():
        # what it was refused for must not refuse the calls of its proof
        enabled.proof = Proof("not yet")
        # Of labels nothing is known either until it is proven.
        code, model = attach(enabled, family), enabled.module
        verify = enabled.options.verify
        enabled.kind = kept.key_of(model, code)
        proof = _proof(enabled, code)
        if verify and code.onlooker is not None and proof.why_not_unpadded is None:
            proof = replace(proof, why_not_unpadded=f"{code.onlooker}, and sees the padded form")
        is_whole = proof.source in ("twin", "")
        enabled.unknown_code = code.unknown or (None if is_whole else proof.how)
        enabled.is_checked_closely = bool(verify) and (
            bool(code.foreign) or code.hook is not None or not is_whole
        )
        if verify == "strict" and proof.source != "twin":
            known = proof.why_not_packed or proof.how
            proof = _unproven(f"no twin proves the whole of it ({known})")
        enabled.proof = proof
        left_out = ", ".join(proof.leaves_out)
        if left_out and left_out not in enabled.logged:
            enabled.logged.add(left_out)
            logger.warning(
                "packed calls of %s return None for %s, which autopack cannot split by document. "
                "Run one document per row to get it.",
                type(model).__name__,
                left_out,
            )
        enabled.fingerprint = Fingerprint(model, code, enabled.anatomy.configs)


def _proof(enabled: EnabledModel, code: ModelCode) -> Proof:
    """Return the proof of a model by its twin, or one that leaves it to checks of its calls."""
    if not enabled.options.verify:
        return Proof("not asked for (verify=False)")
    foreign = next(iter(code.foreign), None)
    try:
        return proof_by_twin(enabled, foreign)
    except NoTwin as error:
        because = (
            f"{foreign}; no twin tells, for {error}" if foreign else f"no twin tells, for {error}"
        )
    if enabled.options.verify == "strict":
        return _unproven(because)
    # What its own forward makes of a part is compared with nothing; it is handed the form that it
    # knows.
    unasked = why_padding_is_unknown(enabled.module, callable_part(enabled))
    if because not in enabled.logged:
        enabled.logged.add(because)
        logger.warning(
            "%s could not be proven by a tiny copy of it, so its calls are checked while they run: "
            "%s",
            type(enabled.module).__name__,
            because,
        )
    return Proof(f"call by call, in use ({because})", why_not_unpadded=unasked, source="checks")


def _unproven(reason: str) -> Proof:
    """Return a proof that refuses packed and padded batches for `reason`."""
    return Proof(f"not: {reason}", reason, reason, reason)
