"""Let several runs of a module in one call begin with the same buffers, as the documents alone would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Buffers:
    """What the buffers of a module hold that a forward in training may write to.

    A spectral norm takes a step of its power iteration in every forward. A document alone begins where the call began,
    and so does every part of a packed call that runs the module again. Left out is what counts all that has been seen
    (batch norms), to which every run adds.
    """

    def __init__(self, module: nn.Module):
        self._held = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            if owner.training and "num_batches_tracked" not in owner._buffers
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.is_floating_point() and not buffer.is_inference()
        ]
        self._versions = [buffer._version for _, _, buffer, _ in self._held]

    def put_back(self) -> bool:
        """Give the buffers what they held; whether anything had been written to them."""
        written = False
        for number, (owner, name, buffer, held) in enumerate(self._held):
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name], written = buffer, True
            if buffer._version != self._versions[number]:
                with torch.no_grad():
                    buffer.copy_(held)
                self._versions[number], written = buffer._version, True
        return written


class Found:
    """What tensors the modules of a model held, in buffers or as attributes, when a call began.

    Code that keeps something of a row in them hands it on to later calls, and what a document gets alone is what it
    gets where nothing of that has happened.
    """

    def __init__(self, model: nn.Module):
        places = [held for module in model.modules() for held in (module._buffers, vars(module))]
        self._held = [
            (held, name, value.detach().clone())
            for held in places
            for name, value in held.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_floating_point()
        ]

    def renew(self) -> None:
        """Give the model copies of them. Those that it has are left as they are: a graph may have kept them."""
        for held, name, value in self._held:
            held[name] = value.clone()


def from_the_same_buffers(original: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A module's forward, of which all runs but the first begin with the buffers that the first began with."""
    if not module.training or next(module.buffers(), None) is None:
        return original
    kept = Buffers(module)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept.put_back()
        return original(module, *args, **kwargs)

    return run
