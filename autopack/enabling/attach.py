"""Put hooks and marks on a model, and take them off again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from autopack.attention.rotary import PerDocumentRotary, row_dependent_rotaries
from autopack.calls.documents import SpanLogitsHook
from autopack.calls.hooks import EntryHook, ExitHook, PoolerHook
from autopack.calls.pairs import HalfEntryHook, HalfExitHook, PairEntryHook
from autopack.inspection import modules
from autopack.inspection.heads import row_head
from autopack.integrations import peft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.runtime.model import Enabled
from autopack.runtime.marks import HANDLE


def attach(model: PreTrainedModel, enabled: Enabled) -> None:
    """Install the sites that the model needs, mark its attention modules and hook its entries."""
    enabled.acquire()
    enabled.mark()
    for level, module in enumerate(enabled.entries):
        of_half = enabled.half_of(module) is not None
        leave = HalfExitHook(enabled, level) if of_half else ExitHook(enabled, level)
        enabled.hooks += [
            module.register_forward_pre_hook(_entry_hook(enabled, level), with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]
        pooler = getattr(module, "pooler", None)
        if isinstance(pooler, nn.Module) and not isinstance(pooler, nn.Linear):
            enabled.hooks.append(pooler.register_forward_pre_hook(PoolerHook(enabled)))
        head = row_head(module)
        for child in module.children() if head is not None and head.spans else ():
            if child not in enabled.entries:
                enabled.hooks.append(child.register_forward_hook(SpanLogitsHook()))
    for rotary in row_dependent_rotaries(model):
        enabled.hooks.append(rotary.register_forward_hook(PerDocumentRotary(enabled), with_kwargs=True))
    peft.watch()
    enabled.active = True


def _entry_hook(enabled: Enabled, level: int) -> EntryHook:
    module = enabled.entries[level]
    if modules.is_pair(module):
        return PairEntryHook(enabled, level)
    decodes = enabled.half_of(module)
    return EntryHook(enabled, level) if decodes is None else HalfEntryHook(enabled, level, decodes)


def detach(model: PreTrainedModel, enabled: Enabled) -> None:
    """Take back all that `attach` and calls since have put on the model; safe after a part of it."""
    enabled.active = False
    _remove_hooks(model)
    enabled.unmark()
    enabled.unbind()
    model.__dict__.pop(HANDLE, None)
    enabled.release()


def _remove_hooks(model: nn.Module) -> None:
    # By type and not by handle: a copied model has copies of the hooks, and no handles of its own.
    ours = (EntryHook, ExitHook, PoolerHook, PerDocumentRotary, SpanLogitsHook)
    for module in model.modules():
        for hooks, extras in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [n for n, hook in hooks.items() if isinstance(hook, ours)]:
                del hooks[number]
                for extra in extras:
                    extra.pop(number, None)
