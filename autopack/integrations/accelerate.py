"""Mixers whose instances have a forward of their own, as accelerate's hooks for several devices and offloading give.

The hook keeps the forward that it found in `_old_forward` and calls that, past the class, where autopack stands.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn


class _ByClass:
    """A kept forward that goes by the class of its module, as a call of the module itself would."""

    def __init__(self, kept: MethodType):
        self.kept = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.kept.__self__
        return type(module).forward(module, *args, **kwargs)


def reroute(modules: list[nn.Module]) -> None:
    """Let the hooks of these modules call what stands at their classes."""
    for module in modules:
        kept = module.__dict__.get("_old_forward")
        own: Any = type(module).forward
        if isinstance(kept, MethodType) and kept.__func__ is getattr(own, "autopack_original", None):
            module.__dict__["_old_forward"] = _ByClass(kept)


def put_back(modules: list[nn.Module]) -> None:
    """Give every module what `reroute` took from it."""
    for module in modules:
        kept = {n: f.kept for n in ("_old_forward", "forward") if isinstance(f := module.__dict__.get(n), _ByClass)}
        module.__dict__.update(kept)


def covered_mixer(mixers: list[nn.Module]) -> str | None:
    """The class of a mixer whose instance has a forward of its own, past the one that keeps documents apart."""
    return next((type(mixer).__name__ for mixer in mixers if _goes_past_its_class(mixer)), None)


def _goes_past_its_class(module: nn.Module) -> bool:
    if isinstance(module.__dict__.get("forward"), _ByClass | None):
        return False
    kept, own = module.__dict__.get("_old_forward"), type(module).forward
    by_class = isinstance(kept, _ByClass) or (isinstance(kept, MethodType) and kept.__func__ is own)
    # Whose hook it is can be told by what it left; another's forward may do anything.
    return not (by_class and hasattr(module, "_hf_hook"))
