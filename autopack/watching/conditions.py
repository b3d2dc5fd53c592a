"""The conditions of a check: the same random numbers in each run, nothing left behind, and the precision of a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.fields import Fields, fields_of
from autopack.auditing.left_as_found import may_be_written, noise_of, without_noise
from autopack.calls.call import Call
from autopack.inspection import torches
from autopack.inspection.fingerprint import only_checkpoints
from autopack.inspection.randomness import afterwards, drawing_nothing
from autopack.runtime.model import EnabledModel

_CHECKPOINTS = "gradient_checkpointing"


@contextmanager
def unnoticed(
    model: PreTrainedModel, enabled: EnabledModel, noise: bool = False, checkpoints: bool = False
) -> Iterator[None]:
    """Run a model without gradients or compiled code; restore the model, its counts and random state.

    Dropout and its like are on only with `noise`, checkpoints by functions other than torch's only with `checkpoints`.
    The model writes to copies of its buffers, since the graph of an earlier call may have kept those that it has.
    """
    counted, read, audited = enabled.tally.counted(), enabled.padding_read, enabled.is_audited
    caches = torch.is_autocast_cache_enabled()
    kept: list[tuple[nn.Module, str, Any]] = list(noise_of(model)) if noise else []
    kept += [(module, _CHECKPOINTS, True) for module in model.modules() if checkpoints and _checkpoints_its_way(module)]

    def put_back() -> None:
        torch.set_autocast_cache_enabled(caches)
        vars(enabled.tally).update(counted)
        enabled.padding_read, enabled.is_audited = read, audited

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            # Documents have lengths that no graph was made for.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_noise(model))
        for module, name, value in kept:
            setattr(module, name, value)
        _copy_buffers(model)
        stack.enter_context(afterwards(put_back))
        # Weights that are cast without gradients must not be found by a later call under the same autocast.
        torch.set_autocast_cache_enabled(False)
        enabled.padding_read, enabled.is_audited = None, True
        yield


@contextmanager
def not_sharing(enabled: EnabledModel) -> Iterator[None]:
    """Compute for each document what several begin with."""
    options = enabled.options
    enabled.options = replace(options, share=False)
    try:
        yield
    finally:
        enabled.options = options


def _checkpoints_its_way(module: nn.Module) -> bool:
    function = vars(module).get("_gradient_checkpointing_func")
    return bool(vars(module).get(_CHECKPOINTS)) and function is not None and not only_checkpoints(function)


def _copy_buffers(model: nn.Module) -> None:
    """Give a model copies of its buffers; `without_noise` puts those back that it has."""
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and may_be_written(buffer):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


class Runs:
    """Runs of one call, each from the same random state and the same buffers and tensors of the modules.

    Code that keeps something of a row there would hand it on to the next run.
    """

    def __init__(self, call: Call):
        self._module: Any = call.module
        places = [held for module in call.module.modules() for held in (module._buffers, vars(module))]
        self._held = [
            (held, name, value, value if value.requires_grad else value.detach().clone())
            for held in places
            for name, value in held.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.is_floating_point()
        ]

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """Return the output of the model."""
        self._begin()
        with drawing_nothing(self._module):
            return self._module(**arguments)

    def _begin(self) -> None:
        for held, name, value, copied in self._held:
            held[name] = value if copied is value else copied.clone()

    def fields(self, arguments: dict[str, Any]) -> Fields:
        """Return the output of the model, field by field."""
        return fields_of(self(arguments))


@contextmanager
def precisions() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes in which layers run in this thread meanwhile, by their weights and autocast."""
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
