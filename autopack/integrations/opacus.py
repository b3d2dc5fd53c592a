"""Keep autopack's own forwards out of Opacus's count.

Opacus counts the forwards of each layer until as many backwards have come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def uncounted(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switch off the hooks of Opacus's `GradSampleModule` on these modules within the block.

    They keep a layer's inputs until a backward comes, and the gradients of samples until all
    forwards have had theirs. A forward without a backward would mix the next batch's gradients with
    its own.
    """
    hooks = (hook for module in modules for hook in module._forward_hooks.values())
    counting: set[Any] = {
        owner
        for hook in hooks
        if type(owner := getattr(hook, "__self__", None)).__module__.startswith("opacus.")
        and getattr(owner, "hooks_enabled", False) is True
    }
    for owner in counting:
        owner.hooks_enabled = False
    try:
        yield
    finally:
        for owner in counting:
            owner.hooks_enabled = True
