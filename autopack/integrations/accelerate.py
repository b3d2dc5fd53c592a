"""Modules to whose instances accelerate gives a forward of their own.

Its hooks for several devices and offloading keep the forward that they found in `_old_forward` and
call it, past the class, where autopack stands at mixers. Its mixed precision keeps a model's
forward in `_original_forward`, and wraps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from autopack.inspection.foreign import is_in, layers, original


class _ByClass:
    """Stand-in for a kept forward: it calls the forward of the module's class."""

    def __init__(self, kept: MethodType):
        self.kept = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.kept.__self__
        return type(module).forward(module, *args, **kwargs)


def reroute(modules: list[nn.Module]) -> None:
    """Replace forwards that accelerate keeps on modules by calls of the class's present one."""
    for module in modules:
        kept = module.__dict__.get("_old_forward")
        own: Any = type(module).forward
        if isinstance(kept, MethodType) and kept.__func__ is getattr(
            own, "autopack_original", None
        ):
            module.__dict__["_old_forward"] = _ByClass(kept)


def put_back(modules: list[nn.Module]) -> None:
    """Undo `reroute`: restore the forwards that it replaced on modules."""
    for module in modules:
        own = module.__dict__
        own.update({name: each.kept for name, each in own.items() if isinstance(each, _ByClass)})


def covered_mixer(mixers: list[nn.Module]) -> str | None:
    """Return the class name of the first mixer whose own forward goes past its class's, or None.

    Such a forward bypasses the one that keeps documents apart.
    """
    return next((type(mixer).__name__ for mixer in mixers if _goes_past_its_class(mixer)), None)


@contextmanager
def in_their_own_precision(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Take accelerate's mixed precision off the forwards of some modules within the block."""
    found = [
        (module, forward)
        for module in modules
        if (forward := _in_mixed_precision(module)) is not None
    ]
    try:
        for module, _ in found:
            kept: Any = module.__dict__["_original_forward"]
            if getattr(kept, "__func__", None) is type(module).forward:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = kept
        yield
    finally:
        for module, forward in found:
            module.__dict__["forward"] = forward


def says_when_to_step() -> bool:
    """Return True if accelerate tells DeepSpeed which backward ends a step. Older releases let
    DeepSpeed count backwards."""
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper  # needs DeepSpeed

    return "sync_gradients" in inspect.signature(DeepSpeedEngineWrapper.backward).parameters


def _in_mixed_precision(module: nn.Module) -> Any:
    """Return a module's forward if accelerate's autocast is its outermost wrapper, or None."""
    kept, forward = module.__dict__.get("_original_forward"), module.__dict__.get("forward")
    outer = getattr(forward, "__func__", forward)
    if kept is None or not isinstance(outer, FunctionType):
        return None
    inner = original(getattr(kept, "__func__", kept))
    by_accelerate = is_in(outer.__code__.co_filename, "accelerate")
    return forward if by_accelerate and any(layer is inner for layer in layers(forward)) else None


def _goes_past_its_class(module: nn.Module) -> bool:
    """Return True if a module's own forward does not end in the forward of its class."""
    if isinstance(module.__dict__.get("forward"), _ByClass | None):
        return False
    kept, own = module.__dict__.get("_old_forward"), type(module).forward
    by_class = isinstance(kept, _ByClass) or (isinstance(kept, MethodType) and kept.__func__ is own)
    # Whose hook it is can be told by what it left; another's forward may do anything.
    return not (by_class and hasattr(module, "_hf_hook"))
