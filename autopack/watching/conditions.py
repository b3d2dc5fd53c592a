"""The conditions of a check: nothing drawn at random, nothing left behind, and how precisely the model computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.left_as_found import without_noise
from autopack.inspection import torches
from autopack.inspection.randomness import afterwards
from autopack.runtime.model import EnabledModel


@contextmanager
def unnoticed(model: PreTrainedModel, enabled: EnabledModel) -> Iterator[None]:
    """Run a model without noise, gradients or compiled code, and leave no trace: in it, in its counts, in random state.

    It writes to copies of its buffers, since the graph of the live call may have kept those that it has.
    """
    counted = enabled.tally.counted()
    caches = torch.is_autocast_cache_enabled()

    def put_back() -> None:
        torch.set_autocast_cache_enabled(caches)
        vars(enabled.tally).update(counted)

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            # Documents have lengths that no graph was made for.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_noise(model))
        _copy_buffers(model)
        stack.enter_context(afterwards(put_back))
        # Weights that are cast without gradients must not be found by a later call under the same autocast.
        torch.set_autocast_cache_enabled(False)
        yield


def _copy_buffers(model: nn.Module) -> None:
    """Give a model copies of its buffers; `without_noise` puts those back that it has."""
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


@contextmanager
def precisions() -> Iterator[set[torch.dtype]]:
    """The dtypes in which layers are run in this thread meanwhile, as their weights and autocast say."""
    dtypes: set[torch.dtype] = set()
    thread = threading.get_ident()

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        weight = dict(module._parameters).get("weight")
        for tensor in (weight, next(iter(args), None)) if threading.get_ident() == thread else ():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and weight is not None:
                dtypes.add(torches.taken_by_sdpa(tensor))  # by the rule of layers, which is the same

    # One for all modules and not one for each, which the model would be looked at again for.
    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield dtypes
    finally:
        handle.remove()
