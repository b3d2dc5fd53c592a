"""Objects on single modules that their classes do not put there: hooks and functions."""

from __future__ import annotations

from itertools import compress
from typing import Any

from torch import nn

from autopack.inspection.foreign import Place, is_own, layers

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Names of a module's dicts of hooks, by a number that torch gives once in a process."""
_HOOK_OF_NOISE = "neftune_post_forward_hook"


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the forward and backward hooks of a module by number."""
    held = filter(None, map(vars(module).__getitem__, HOOKS))
    return {number: hook for hooks in held for number, hook in hooks.items()}


def looks_at_rows(hook: Any) -> bool:
    """Return True if a hook on a module may read rows and columns (third-party, PEFT's, NEFTune's).

    NEFTune's noise shrinks with the row. PEFT's hooks (EVA, CorDA) collect a layer's inputs by the
    mask. A hook that only asks for gradients (`output.requires_grad_(True)`, for adapters under
    checkpointing) does not count.
    """
    of_peft = any(map(_collects_for_peft, layers(hook)))
    if is_own(hook) and not of_peft:
        return getattr(hook, "__name__", None) == _HOOK_OF_NOISE
    code = getattr(hook, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _collects_for_peft(layer: Any) -> bool:
    """Return True for a function of PEFT, except hooks that only pass on per-row arguments."""
    name = getattr(layer, "__name__", "")
    return str(getattr(layer, "__module__", "")).startswith("peft.") and "pre_" not in name


def functions_on(module: nn.Module) -> list[Place]:
    """Return (its dict, name, value) of each callable that a module itself holds, not its class."""
    held = vars(module)
    return [(held, name, held[name]) for name in compress(held, map(callable, held.values()))]
