"""Hooks that libraries and users have put on modules: whose they are, and whether they care about rows and columns."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopack.inspection.code_origin import function_of, is_from, is_own, layers

_TAKE_NO_PART = (("deepspeed",), ("wandb", "integration", "torch"))
"""Places of hooks that leave results as they are: DeepSpeed's engine gathers parameters and counts time, and
`wandb.watch` records parameters."""
_NOISE = "neftune_post_forward_hook"


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """The forward and backward hooks of a module by number, which torch gives once in a process."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return {number: hook for kind in kinds for number, hook in kind.items()}


def is_foreign_hook(hook: Any) -> bool:
    """Whether a hook is somebody else's, and takes part in what the model computes as far as anybody knows."""
    return not is_own(function_of(hook)) and not _takes_no_part(hook)


def looks_at_rows(hook: Any, module: nn.Module) -> bool:
    """Whether a hook on a module may read rows and columns: somebody else's, PEFT's, or NEFTune's.

    NEFTune's noise shrinks with the row, where there is any, and PEFT's (EVA, CorDA) collect what comes to a layer by
    the mask. One that asks for gradients and nothing else (`output.requires_grad_(True)`, for adapters under
    checkpointing) does not.
    """
    function = function_of(hook)
    of_peft = any(map(_collects_for_peft, layers(function)))
    if is_own(function) and not of_peft:
        return getattr(function, "__name__", None) == _NOISE and noise_of(module) != 0
    if _takes_no_part(hook):
        return False
    code = getattr(function, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _takes_no_part(hook: Any) -> bool:
    return any(is_from(hook, place) for place in _TAKE_NO_PART)


def noise_of(module: nn.Module) -> Any:
    """How much noise NEFTune's hook adds to what a module returns; None where nothing says so."""
    return vars(module).get("neftune_noise_alpha")


def _collects_for_peft(layer: Any) -> bool:
    """Whether code is PEFT's, but for what hands on an argument for each row, which `integrations.peft` knows."""
    name = getattr(layer, "__name__", "")
    return str(getattr(layer, "__module__", "")).startswith("peft.") and "pre_" not in name
