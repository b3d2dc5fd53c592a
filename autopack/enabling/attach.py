"""Put marks and hooks on a model and install its sites, and take all of it off again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from autopack import registry
from autopack.attention.rotary import PerDocumentRotary, row_dependent_rotaries
from autopack.calls.entry import Entry
from autopack.calls.hooks import EntryHook, ExitHook, PoolerHook, SpanLogitsHook
from autopack.enabling.sites import needed_sites
from autopack.family import Family
from autopack.inspection import modules
from autopack.inspection.anatomy import Anatomy
from autopack.integrations import accelerate, peft
from autopack.patching import SiteLease
from autopack.runtime.checkpointing import unbind_checkpointing
from autopack.runtime.marks import HANDLE, MARK, Mark, is_severed
from autopack.runtime.model import EnabledModel, Options, Traits

_HOOKS = (EntryHook, ExitHook, PoolerHook, PerDocumentRotary, SpanLogitsHook)


def examine(model: PreTrainedModel, family: Family, options: Options) -> EnabledModel:
    """Find what has to be known of a model to enable it; changes nothing."""
    attending = {name for name, way in family.mixers.items() if way.attends}
    anatomy = Anatomy.of(model, set(family.mixers), attending)
    media = registry.media_of(anatomy.model_type)
    traits = Traits.of(family, anatomy, registry.numbering_of(model.config), media)
    return EnabledModel(anatomy, traits, options, SiteLease(partial(needed_sites, anatomy, family.sites)))


def attach(model: PreTrainedModel, enabled: EnabledModel, family: Family) -> None:
    """Mark what mixes tokens, install the sites that the model needs, and hook its entries."""
    anatomy = enabled.anatomy
    across = modules.cross_attention(anatomy.halves[1], anatomy.mixing) if anatomy.halves is not None else []
    for module in anatomy.mixing:
        reads_encoder = any(module is one for one in across)
        module.__dict__[MARK] = Mark(enabled.link, family.way_of(module), family.adjustment_of(module), reads_encoder)
    enabled.lease.follow(enabled.implementations())
    for level, module in enumerate(anatomy.entries):
        entry = Entry.of(enabled, level, registry.numbering_of(module.config))
        module.register_forward_pre_hook(EntryHook(entry), with_kwargs=True)
        module.register_forward_hook(ExitHook(entry), always_call=True)
        pooler = getattr(module, "pooler", None)
        if isinstance(pooler, nn.Module) and not isinstance(pooler, nn.Linear):
            pooler.register_forward_pre_hook(PoolerHook(enabled.link))
        for child in module.children() if entry.head is not None and entry.head.spans else ():
            if not any(child is other for other in anatomy.entries):
                child.register_forward_hook(SpanLogitsHook())
    for rotary in row_dependent_rotaries(model):
        rotary.register_forward_hook(PerDocumentRotary(enabled.link), with_kwargs=True)
    peft.watch()
    enabled.link.next_hook = RemovableHandle.next_id
    enabled.active = True


def detach(model: PreTrainedModel, enabled: EnabledModel) -> None:
    """Take back all that `attach` and calls since have put on the model; safe after a part of it."""
    enabled.active = False
    _remove_hooks(model)
    for module in enabled.anatomy.mixing:
        module.__dict__.pop(MARK, None)
    unbind_checkpointing(enabled.anatomy.checkpointed)
    accelerate.put_back(enabled.anatomy.mixers)
    model.__dict__.pop(HANDLE, None)
    enabled.lease.release()
    strip_severed(model)


def strip_severed(part: nn.Module) -> bool:
    """Take marks and hooks off what is a copy of a part of an enabled model; whether there were any."""
    modules = list(part.modules())
    marked = [module for module in modules if is_severed(module)]
    if not marked and not any(_is_severed(hook) for module in modules for hook in _hooks_of(module)):
        return False
    for module in marked:
        del module.__dict__[MARK]
    _remove_hooks(part, _is_severed)
    # What of these is of a model that is still enabled is bound again by its next call.
    accelerate.put_back(modules)
    unbind_checkpointing(modules)
    return True


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _is_severed(hook: Any) -> bool:
    """Whether a hook is of an enabled model that its module is no longer a part of."""
    if not isinstance(hook, _HOOKS):
        return False
    link = hook.entry.link if isinstance(hook, EntryHook | ExitHook) else getattr(hook, "link", None)
    return link is not None and link.model is None


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, _HOOKS)


def _remove_hooks(model: nn.Module, wanted: Callable[[Any], bool] = _is_ours) -> None:
    # By type and not by handle: a copied model has copies of the hooks, and no handles of its own.
    for module in model.modules():
        for hooks, extras in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [n for n, hook in hooks.items() if wanted(hook)]:
                del hooks[number]
                for extra in extras:
                    extra.pop(number, None)
