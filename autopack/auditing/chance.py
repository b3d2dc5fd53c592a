"""Branches that a model takes by chance: an audit that draws numbers at random may never see the rare ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRAWN = {"all draws near 0": 1e-4, "all draws near 1": 1 - 1e-4}
"""What is drawn for every uniform number, by the words for it."""
_EQUAL = (torch.rand, torch.rand_like)


class Pinned(TorchFunctionMode):
    """While it is in force in a thread, torch's uniform numbers of [0, 1) are `value`, and coins fall accordingly."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = function(*args, **given)
        if function in _EQUAL:
            return found.fill_(self.value)
        if function is torch.Tensor.uniform_:
            low, high = (*args[1:], *(given[name] for name in ("from", "to") if name in given), 0.0, 1.0)[:2]
            return found.fill_(low + (high - low) * self.value)
        if function in (torch.bernoulli, torch.Tensor.bernoulli) and found.shape == args[0].shape and len(args) == 1:
            return (args[0] > self.value).to(found.dtype)
        return found
