"""Look at a model, attach to it and prove it; and again where it is no longer what it was."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel

from autopack import registry
from autopack.enabling import twin_calls
from autopack.enabling.attach import attach, look_at, remove_hooks, strip_severed
from autopack.enabling.by_twin import first_label_counts_in_twin
from autopack.enabling.prove import prove
from autopack.enabling.sites import needed_sites
from autopack.errors import AutopackError
from autopack.family import Family
from autopack.inspection.changes import Watch
from autopack.runtime.model import EnabledModel, Proof
from autopack.runtime.scope import MARK


def renew(enabled: EnabledModel, packs: bool) -> None:
    """Look at an enabled model again, which is no longer what it was: mark and hook what it is now, and prove that.

    `packs` says that a call has brought packed rows, for which some of the proof may have waited.

    What cannot be proven is refused by later calls; padded batches then stay as they come.
    """
    model, before = enabled.anatomy.entries[0], enabled.anatomy
    # Hooks are what people put on one rank alone; layers are replaced and wrapped on all of them.
    only_hooks = enabled.proof.waits or (enabled.watch is not None and enabled.watch.only_hooks())
    enabled.watch = None  # until it is settled: after an interrupt the next call looks at it again
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
        settle(model, enabled, family, packs, on_one_rank=only_hooks and bool(enabled.groups))
    except AutopackError as error:
        reason = f"it was changed after it had been enabled, and cannot be served any more: {error}"
        enabled.proof = Proof(f"not: {reason}", reason, reason, reason)


def settle(
    model: PreTrainedModel, enabled: EnabledModel, family: Family, packs: bool = False, on_one_rank: bool = False
) -> None:
    """Attach to a model and prove it; from then on it is watched.

    Where it may be `on_one_rank` alone, of several that gather its parameters together, the model itself is not run.
    """
    # Asked when rows first begin alike, or ranks first share them, and then of what the model is.
    enabled.prefixes_proven_by, enabled.parts_proven_by = twin_calls.why_not_prefixes, twin_calls.why_not_parts
    enabled.said_by_twins = {}
    with enabled.settling():
        enabled.proof = Proof("not yet")  # what it was refused for must not refuse the calls of its audit
        code = attach(model, enabled, family, lambda level: first_label_counts_in_twin(model, level))
        prove(model, enabled, code, packs, on_one_rank)
        enabled.media_proven_by = None if twin_calls.media_are_recorded(enabled) else twin_calls.why_not_media
        enabled.watch = Watch(model, code, enabled.anatomy.configs)
