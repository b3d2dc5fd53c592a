"""Opacus counts the forwards of each layer until as many backwards have come; autopack's own must not be counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def uncounted(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run without the hooks of Opacus's `GradSampleModule` on these modules, which only look on.

    They keep what a layer was given until a backward comes, and samples' gradients until all forwards have had theirs;
    a forward without one would make the next batch's gradients those of both.
    """
    hooks = [hook for module in modules for hook in module._forward_hooks.values()]
    owners: list[Any] = [getattr(hook, "__self__", None) for hook in hooks]
    counting = {id(owner): owner for owner in owners if _counts(owner)}.values()
    for owner in counting:
        owner.hooks_enabled = False
    try:
        yield
    finally:
        for owner in counting:
            owner.hooks_enabled = True


def _counts(owner: object) -> bool:
    return type(owner).__module__.startswith("opacus.") and getattr(owner, "hooks_enabled", False) is True
