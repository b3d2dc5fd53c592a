"""Objects on single modules that their classes do not put there: hooks, functions, tensor types."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from autopack.inspection.code_origin import Place, is_of, is_own, layers

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Names of a module's dicts of hooks, by a number that torch gives once in a process."""
NOISE = "neftune_noise_alpha"
"""Attribute of a module with the scale of NEFTune's noise on its output."""
_HOOK_OF_NOISE = "neftune_post_forward_hook"
_PLAIN = (torch.Tensor, nn.Parameter, type(None))


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the forward and backward hooks of a module by number."""
    return {number: hook for kind in HOOKS for number, hook in vars(module)[kind].items()}


def is_foreign_hook(hook: Any) -> bool:
    """Return True if a hook is third-party."""
    return not is_own(hook)


def looks_at_rows(hook: Any, module: nn.Module) -> bool:
    """Return True if a hook on a module may read rows and columns (third-party, PEFT's, NEFTune's).

    NEFTune's noise, if any, shrinks with the row. PEFT's hooks (EVA, CorDA) collect a layer's
    inputs by the mask. A hook that only asks for gradients (`output.requires_grad_(True)`, for
    adapters under checkpointing) does not count.
    """
    of_peft = any(map(_collects_for_peft, layers(hook)))
    if is_own(hook) and not of_peft:
        return getattr(hook, "__name__", None) == _HOOK_OF_NOISE and vars(module).get(NOISE) != 0
    code = getattr(hook, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _collects_for_peft(layer: Any) -> bool:
    """Return True if code is PEFT's, but for per-row arguments (see `integrations.peft`)."""
    name = getattr(layer, "__name__", "")
    return str(getattr(layer, "__module__", "")).startswith("peft.") and "pre_" not in name


def foreign_hook_of_accelerate(module: nn.Module) -> Any:
    """Return a third-party hook by which accelerate runs a module, or None."""
    waiting = [module.__dict__.get("_hf_hook")]
    for hook in waiting:
        if hook is not None and not is_of(type(hook), "accelerate"):
            return hook
        waiting += getattr(hook, "hooks", ())
    return None


def functions_on(module: nn.Module) -> Iterator[Place]:
    """Yield the functions and other callables that a module itself holds, not its class."""
    held = vars(module)
    for name, value in held.items():
        if callable(value):
            yield held, name, value


def types_in(held: list[dict[str, Any]]) -> frozenset[type]:
    """Return the types of parameters and buffers in dicts, without plain and torch's tensors."""
    kinds = set(map(type, chain.from_iterable(map(dict.values, held))))
    return frozenset(kind for kind in kinds if kind not in _PLAIN and kind.__module__.partition(".")[0] != "torch")
