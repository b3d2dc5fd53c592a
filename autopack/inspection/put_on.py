"""Objects on single modules that their classes do not put there: hooks, functions, tensor types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopack.inspection.code_origin import (
    Place,
    constructors,
    innermost,
    is_from,
    is_of,
    is_own,
    layers,
    located,
    original,
    whose,
)
from autopack.inspection.source import names_in

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Names of a module's dicts of hooks, by a number that torch gives once in a process."""
_TAKE_NO_PART = (("deepspeed",), ("wandb", "integration", "torch"))
"""Places of hooks that leave results unchanged.

DeepSpeed's engine gathers parameters and counts time; `wandb.watch` records parameters.
"""
_NOISE = "neftune_post_forward_hook"
_FORWARDS = {
    "forward": "its forward, set on the instance, is",
    "_old_forward": "the forward that a hook keeps is",
    "_loss_function": "its loss_function is",
}
"""Functions on a module that replace its class's own, in words."""
_PLAIN = (torch.Tensor, nn.Parameter, type(None))


def hooks_of(module: nn.Module) -> dict[int, Any]:
    """Return the forward and backward hooks of a module by number."""
    return {number: hook for kind in HOOKS for number, hook in vars(module)[kind].items()}


def is_foreign_hook(hook: Any) -> bool:
    """Return True if a hook is third-party and is not known to leave results unchanged."""
    return not is_own(hook) and not _takes_no_part(hook)


def looks_at_rows(hook: Any, module: nn.Module) -> bool:
    """Return True if a hook on a module may read rows and columns (third-party, PEFT's, NEFTune's).

    NEFTune's noise, if any, shrinks with the row. PEFT's hooks (EVA, CorDA) collect a layer's
    inputs by the mask. A hook that only asks for gradients (`output.requires_grad_(True)`, for
    adapters under checkpointing) does not count.
    """
    of_peft = any(map(_collects_for_peft, layers(hook)))
    if is_own(hook) and not of_peft:
        return getattr(hook, "__name__", None) == _NOISE and noise_of(module) != 0
    if _takes_no_part(hook):
        return False
    code = getattr(hook, "__code__", None)
    return code is None or code.co_names != ("requires_grad_",) or bool(code.co_freevars)


def _takes_no_part(hook: Any) -> bool:
    return any(is_from(hook, place) for place in _TAKE_NO_PART)


def noise_of(module: nn.Module) -> Any:
    """Return the scale of NEFTune's noise on a module's output; None if it has none."""
    return vars(module).get("neftune_noise_alpha")


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


def why_foreign_forward(module: nn.Module) -> str | None:
    """Return the third-party code in place of a module's forward or loss, in words, or None."""
    for name, said in _FORWARDS.items():
        value = module.__dict__.get(name)
        if value is not None and not is_own(value):
            return f"{said} {whose(value)}"
    hook = foreign_hook_of_accelerate(module)
    if hook is not None:
        return f"a hook by which accelerate runs it is a {type(hook).__qualname__} of {type(hook).__module__}"
    return None


def functions_on(module: nn.Module) -> Iterator[Place]:
    """Yield the functions and other callables that a module itself holds, not its class."""
    held = vars(module)
    for name, value in held.items():
        if callable(value):
            yield held, name, value


def why_foreign_function(module: nn.Module, name: str, value: Any) -> str | None:
    """Return the objection, in words, to a function on a module; None if there is none.

    The function is third-party, or its class does not put it there. torch has many functions, and
    some mix tokens, so the constructor has to name the function. `why_foreign_forward` judges
    forwards and losses.
    """
    if name in _FORWARDS:
        return None
    value = original(value)  # what autopack has put its own around
    inner = innermost(value)
    if isinstance(inner, type):
        return None if located(inner) else f"its {name} is the class {inner.__module__}.{inner.__qualname__}"
    if not is_own(value):
        return f"its {name}, set on the instance, is {whose(value)}"
    if isinstance(value, MethodType) and value.__self__ is module:
        return None
    module_name = str(getattr(inner, "__module__", "") or "torch")
    of_torch = module_name.startswith(("torch", "_")) and module_name != "torch.utils.checkpoint"
    if not of_torch or any(_names(function, inner) for function in _making(type(module))):
        return None
    return f"its {name}, set on the instance, is {whose(value)}, which its class does not put there"


def _making(cls: type) -> Iterator[FunctionType]:
    """Yield the constructors of a class, and the methods that they name."""
    for constructor in constructors(cls):
        yield constructor
        methods = (getattr(cls, name, None) for name in names_in(constructor.__code__))
        yield from (method for method in methods if isinstance(method, FunctionType))


def _names(constructor: FunctionType, function: Any) -> bool:
    """Return True if a constructor names a function, its class, or a table that holds it."""
    names, known = names_in(constructor.__code__), constructor.__globals__
    owner = getattr(function, "__self__", None)
    if any(getattr(torch.fft, name, None) is function for name in names):  # they have longer names of their own
        return True
    if getattr(function, "__name__", None) in names or (isinstance(owner, type) and owner.__name__ in names):
        return True
    tables = (known[name] for name in names if isinstance(known.get(name), Mapping))
    return any(value is function for table in tables for value in table.values())


def is_mentioned(name: str, modules: list[nn.Module]) -> bool:
    """Return True if a function in transformers' classes of these modules uses a name."""
    classes = {cls for module in modules for cls in type(module).__mro__}
    return any(
        isinstance(layer, FunctionType) and name in names_in(layer.__code__)
        for cls in classes
        if cls.__module__.startswith(("transformers.models.", "transformers.modeling_layers"))
        for value in vars(cls).values()
        for layer in layers(value)
    )


def types_in(held: list[dict[str, Any]]) -> frozenset[type]:
    """Return the types of parameters and buffers in dicts, without plain and torch's tensors."""
    kinds = set(map(type, chain.from_iterable(map(dict.values, held))))
    return frozenset(kind for kind in kinds if not _is_plain(kind))


def why_foreign_tensor(module: nn.Module) -> str | None:
    """Return a module's first parameter or buffer of a third-party type, in words, or None."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        kind = type(tensor)
        if not _is_plain(kind):
            return f"its {name} is a {kind.__module__}.{kind.__qualname__}"
    return None


def _is_plain(kind: type) -> bool:
    return kind in _PLAIN or kind.__module__.partition(".")[0] == "torch"
