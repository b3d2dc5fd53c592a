"""Put marks, hooks and functions of autopack on a model, and take all of it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from autopack import registry
from autopack.attention.document_mask import adapt_mask, adapt_preprocessing
from autopack.attention.rotary import PerDocumentRotary
from autopack.attention.site import PARAMETERS, adapt_attention
from autopack.auditing.asking import argument_names, first_label_counts
from autopack.calls.entry import Entry
from autopack.calls.hooks import EntryHook, ExitHook, adapt_forward
from autopack.calls.met_inside import OwnPositionsHook, PoolerHook, SpanLogitsHook, adapt_loss
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.family import Family, by_class
from autopack.inspection import masks, modules, releases, source
from autopack.inspection.code import ModelCode
from autopack.inspection.foreign import is_of_library, is_own
from autopack.inspection.modules import Anatomy
from autopack.integrations import accelerate, boundaries, peft
from autopack.mixers.site import adapt_mixer
from autopack.patching import Site, SiteLease
from autopack.proving import twin as twins
from autopack.proving.apart import apart, is_apart
from autopack.proving.kept import own_class
from autopack.proving.twin import NoTwin
from autopack.runtime.marks import ENABLED, MARK, Mark, is_severed, mark_of
from autopack.runtime.model import EnabledModel, Neighbours, Options
from autopack.runtime.scope import ArrivalHook, bind_checkpointing
from autopack.runtime.traits import Traits

_HOOKS = (
    EntryHook,
    ExitHook,
    PoolerHook,
    PerDocumentRotary,
    OwnPositionsHook,
    SpanLogitsHook,
    ArrivalHook,
)


def examine(
    model: PreTrainedModel, family: Family, options: Options, renew: Callable[[EnabledModel], None]
) -> EnabledModel:
    """Return the `EnabledModel` of a model that is to be enabled; change nothing.

    `renew` is called when it has changed.
    """
    anatomy, traits = anatomy_and_traits(model, family)
    return EnabledModel(anatomy, traits, options, SiteLease(partial(needed_sites, anatomy)), renew)


def anatomy_and_traits(model: PreTrainedModel, family: Family) -> tuple[Anatomy, Traits]:
    """Return the `Anatomy` of a model, and its `Traits`, which follow from that and the family."""
    attending = {name for name, way in family.mixers.items() if way.attends}
    anatomy = Anatomy(model, set(family.mixers), attending, family.within_token)
    numbering, media = registry.numbering_of(model.config), registry.media_of(anatomy.model_type)
    sounds_together = registry.fact_of(anatomy.model_type, "sounds_together")
    return anatomy, Traits(family, anatomy, numbering, media, sounds_together)


def attach(enabled: EnabledModel, family: Family) -> ModelCode:
    """Mark mixing modules, install a model's sites, hook its entries; return its `ModelCode`.

    What is marked and hooked already is brought up to date.
    """
    anatomy, model = enabled.anatomy, enabled.module
    code = ModelCode(model, enabled.implementations())
    foreign = [code.first_foreign(module) for module in anatomy.entries]
    across = (
        modules.cross_attention(anatomy.halves[1], anatomy.mixing)
        if anatomy.halves is not None
        else []
    )
    to_images: list[nn.Module] = []
    if family.image_mask is not None or enabled.traits.image_of_each:
        to_images = [m for m in modules.cross_attention(model, anatomy.mixing) if m is not model]
    for module in anatomy.mixing:
        way, adjustment = (by_class(of, type(module)) for of in (family.mixers, family.adjustments))
        reads = {"reads_encoder": module in across, "reads_images": module in to_images}
        module.__dict__[MARK] = Mark(enabled.link, way, adjustment, **reads)
        _hook(module, ArrivalHook())
    for module in anatomy.indifferent:
        module.__dict__[MARK] = Mark(enabled.link, mixes=False)
    enabled.lease.follow(enabled.implementations())
    accelerate.reroute(anatomy.mixers)
    enabled.neighbours = Neighbours(
        accelerate.covered_mixer(anatomy.mixers), boundaries.check_step, peft.hands_rows_to_layers
    )
    for level, module in enumerate(anatomy.entries):
        shifts = _shifts_labels(enabled, level) if foreign[level] is not None else None
        entry = Entry(
            enabled,
            level,
            registry.numbering_of(modules.config_of(module, model)),
            foreign,
            shifts,
        )
        _hook(module, EntryHook(entry), before=True, with_kwargs=True)
        _hook(module, ExitHook(entry), always_call=True)
        pooler = getattr(module, "pooler", None)
        if isinstance(pooler, nn.Module) and not isinstance(pooler, nn.Linear):
            _hook(pooler, PoolerHook(enabled.link), before=True)
        for child in module.children() if entry.head is not None and entry.head.spans else ():
            if child not in anatomy.entries:
                _hook(child, SpanLogitsHook())
    for module in modules.handed_others_positions(model):
        _hook(module, OwnPositionsHook(enabled.link), before=True, with_kwargs=True)
    for rotary in modules.row_dependent_rotaries(model):
        _hook(rotary, PerDocumentRotary(enabled.link), with_kwargs=True)
    peft.watch()
    enabled.link.next_hook = RemovableHandle.next_id
    enabled.active = True
    return code


def _shifts_labels(enabled: EnabledModel, level: int) -> bool:
    """Return True if an entry's third-party loss shifts labels, by its twin's answer or its own."""
    module = enabled.anatomy.entries[level]
    if "labels" not in argument_names(module):
        return False

    def ask_twin() -> bool | None:
        twin = modules.entries(twins.of(enabled.module, torch.float32).model)[level]
        return first_label_counts(twin) if type(twin) is own_class(module) else None

    counts = None
    if not is_apart():  # as twins are
        with suppress(NoTwin):
            counts = apart(ask_twin)
    return (first_label_counts(module) if counts is None else counts) is False


def _hook(module: nn.Module, hook: Any, before: bool = False, **options: Any) -> None:
    """Register a forward hook, or update the hook of its type; make a pre-hook the last one."""
    hooks: Any = module._forward_pre_hooks if before else module._forward_hooks
    known = next((number for number, other in hooks.items() if type(other) is type(hook)), None)
    if known is None:
        (module.register_forward_pre_hook if before else module.register_forward_hook)(
            hook, **options
        )
        return
    hooks[known].__dict__.update(vars(hook))  # it may be running
    if before:
        hooks.move_to_end(known)


def detach(enabled: EnabledModel) -> None:
    """Take off all marks, hooks and sites of a model, also of one that is attached in part.

    The mark of the model itself leaves last: where this is interrupted, it can be done again.
    """
    enabled.active = False
    # of the entries, one may have been taken out of the model since
    remove_hooks({part for entry in enabled.anatomy.entries for part in entry.modules()})
    for module in [*enabled.anatomy.mixing, *enabled.anatomy.indifferent]:
        module.__dict__.pop(MARK, None)
    bind_checkpointing(enabled.anatomy.checkpointed, bound=False)
    accelerate.put_back(enabled.anatomy.mixers)
    strip_severed(enabled.module)
    try:
        enabled.lease.release()
    except SiteDrift:
        enabled.module.__dict__.pop(ENABLED, None)
        raise
    enabled.module.__dict__.pop(ENABLED, None)


def strip_severed(part: nn.Module) -> bool:
    """Take a former model's marks and hooks off a copied part; return True if there were any."""
    parts = list(part.modules())
    marked = [module for module in parts if is_severed(module)]
    if not remove_hooks(parts, _is_severed) and not marked:
        return False
    for module in marked:
        del module.__dict__[MARK]
        remove_hooks(module.modules(), lambda hook: isinstance(hook, ArrivalHook))
    # What of these is of a model that is still enabled is bound again by its next call, which finds
    # it changed.
    accelerate.put_back(parts)
    bind_checkpointing(parts, bound=False)
    return True


def _is_severed(hook: Any) -> bool:
    """Return True for a hook of autopack that came with a copied part and has lost its model."""
    if not isinstance(hook, _HOOKS):
        return False
    link = getattr(getattr(hook, "entry", hook), "link", None)
    return link is not None and link.model is None


def remove_hooks(
    modules: Iterable[nn.Module],
    wanted: Callable[[Any], bool] = lambda hook: isinstance(hook, _HOOKS),
) -> bool:
    """Remove hooks of autopack, or the `wanted`, from modules; return True if there were any."""
    # By type and not by handle: a copied model has copies of the hooks, and no handles of its own.
    found = False
    for module in modules:
        for hooks, extras in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (
                module._forward_hooks,
                (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
            ),
        ):
            if not hooks and not any(extras):
                continue
            for number in [n for n, hook in hooks.items() if wanted(hook)]:
                del hooks[number]
                found = True
            for extra in extras:
                # of an interrupted removal, too
                for number in [n for n in extra if n not in hooks]:
                    del extra[number]
    return found


def needed_sites(anatomy: Anatomy, implementations: tuple[str, ...]) -> list[Site]:
    """Return the sites of a model with marked mixers, for these attention implementations."""
    sites = [*_mixer_sites(anatomy.mixers)]
    # a model may be a mixer itself, run on each document alone
    taken = {(site.module, site.path) for site in sites}
    sites += [
        site
        for site in forward_sites(map(type, anatomy.entries))
        if (site.module, site.path) not in taken
    ]
    # The eager functions stand in for sdpa where attention weights are asked for, so they are
    # always needed.
    sites += [
        Site(module, name, adapt_attention, parameters=PARAMETERS)
        for module, name in source.eager_functions(anatomy.attention)
    ]
    if releases.losses():
        sites.append(
            Site(
                releases.LOSS_UTILS,
                "fixed_cross_entropy",
                adapt_loss,
                parameters=("source", "target"),
            ),
        )
    for implementation in implementations:
        if implementation != "eager" and anatomy.attention:
            sites += _attention_sites(anatomy.attention, implementation)
    # Models that attend in code of their own make masks as the others do, which ranks that share
    # rows ask for.
    configs = modules.configs_of([*anatomy.entries])
    by_configs = [getattr(config, "_attn_implementation", None) or "eager" for config in configs]
    for implementation in dict.fromkeys(
        [*implementations, *(by_configs if not anatomy.attention else ())]
    ):
        if masks.has_mask_interface() and masks.mask_function(implementation) is not None:
            sites.append(Site(*masks.MAPPING, adapt_mask, key=implementation))
    if masks.has_mask_interface():
        parameters = ("config", "position_ids")
        sites.append(
            Site(
                masks.MASKING_UTILS,
                "_preprocess_mask_arguments",
                adapt_preprocessing,
                parameters=parameters,
            )
        )
    return sites


def _mixer_sites(mixers: list[nn.Module]) -> Iterable[Site]:
    """Yield the sites of mixers: their forwards, and operations in their Python modules."""
    for kind in dict.fromkeys(modules.defining_class(type(mixer)) for mixer in mixers):
        # A forward of the user's may be taken back at any time; a module that then runs past its
        # site raises.
        yield _forward_site(kind, adapt_mixer, soft=not is_own(vars(kind)["forward"]))
    ways = (
        (mark.way, mixer)
        for mixer in mixers
        if (mark := mark_of(mixer)) is not None and mark.way is not None
    )
    sites = (
        site
        for way, mixer in ways
        for site in way.sites(modules.defining_class(type(mixer)).__module__)
    )
    yield from dict.fromkeys(sites)


def forward_sites(kinds: Iterable[type[nn.Module]]) -> Iterable[Site]:
    """Return sites at transformers' own forwards, so that `model.forward(...)` is `model(...)`."""
    own = (
        kind
        for kind in map(modules.defining_class, kinds)
        if is_of_library(kind) and kind is not nn.Module
    )
    return (_forward_site(kind, adapt_forward, soft=True) for kind in dict.fromkeys(own))


def _forward_site(kind: type[nn.Module], adapter: Callable[..., Any], soft: bool) -> Site:
    """Return the site at a class's forward, for `adapter`; other code may replace a `soft` one."""
    return Site(kind.__module__, f"{kind.__qualname__}.forward", adapter, soft=soft)


def _attention_sites(attention: list[nn.Module], implementation: str) -> list[Site]:
    """Return the sites at the attention functions of one implementation."""
    if releases.attention_function(implementation) is None:
        raise UnsupportedModel(
            f"attn_implementation={implementation!r} is not registered with transformers' "
            "AttentionInterface, so autopack cannot reach it. Load the model with 'sdpa', 'eager', "
            "'flex_attention' or a flash attention.",
            code="backend-unavailable",
        )
    local = source.modules_with_own_function(attention, implementation)
    if local:
        return [
            Site(
                module,
                "ALL_ATTENTION_FUNCTIONS._local_mapping",
                adapt_attention,
                key=implementation,
            )
            for module in local
        ]
    return [Site(*releases.attention_mapping(), adapt_attention, key=implementation)]
