"""Run a model without dropout or router noise, and leave it as it was found."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from autopack.inspection import source
from autopack.inspection.fingerprint import only_checkpoints
from autopack.inspection.randomness import (
    Pinned,
    afterwards,
    generators_restored,
    may_draw_by_itself,
)
from autopack.inspection.state import Contents
from autopack.integrations.accelerate import in_their_own_precision
from autopack.integrations.opacus import uncounted
from autopack.runtime.marks import enabled_in
from autopack.runtime.model import EnabledModel

_DATA = (Tensor, int, float, str, type(None))
_SETTINGS = ("live", "padding_read", "is_audited", "options")
"""Attributes of an enabled model that a run of it may be given others of."""
_FEW = 1_000_000
"""Number of whole numbers up to which a buffer counts something, or says where something is."""


@contextlib.contextmanager
def left_as_found(model: PreTrainedModel) -> Iterator[EnabledModel | None]:
    """Run a block with gradients, no noise, no autocast; yield the `EnabledModel`, restore all.

    Stock yields None. `preserved` says what is restored.
    """
    # An audit may be asked for inside no_grad or inference_mode; gradients are part of it.
    device, enabled = next(model.parameters()).device.type, enabled_in(model)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        # Under autocast rounding would be that of a lower precision than the one by which errors
        # are judged.
        torch.autocast("cpu" if device == "meta" else device, enabled=False),
        in_their_own_precision(list(model.modules())),
        preserved(model, enabled),
    ):
        if enabled is not None:
            enabled.live = None  # what is watched is the user's training
        yield enabled


@contextlib.contextmanager
def trainer_left_as_found(trainer: Any, model: PreTrainedModel) -> Iterator[EnabledModel | None]:
    """Run a block as `left_as_found`; restore the trainer's attributes and gradients too."""
    at_its_steps = getattr(vars(trainer).get("training_step"), "__self__", trainer)
    kept = [(each, dict(vars(each))) for each in (trainer, at_its_steps)]
    counts = copy.deepcopy(vars(trainer).get("_metrics", {}))  # of TRL
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    loaders = len(trainer.accelerator._dataloaders)
    try:
        with left_as_found(model) as enabled:
            yield enabled
    finally:
        for each, attributes in kept:
            vars(each).clear()
            vars(each).update(attributes)
        vars(trainer).get("_metrics", {}).update(counts)
        del trainer.accelerator._dataloaders[loaders:]
        for parameter, gradient in gradients:
            parameter.grad = gradient


def noise_of(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Return (module, attribute, value) of each nonzero rate of dropout, layer drop or jitter."""
    words = ("dropout", "layerdrop", "jitter", "drop_path", "noise_alpha")
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value
        if (
            name == "p"
            if isinstance(module, nn.modules.dropout._DropoutNd)
            else any(word in name for word in words)
        )
    ]


@contextlib.contextmanager
def preserved(
    model: PreTrainedModel,
    enabled: EnabledModel | None = None,
    noise: bool = False,
    checkpoints: bool = False,
) -> Iterator[Callable[[], None]]:
    """Yield a function that renews copied buffers; run a block without noise; restore the model.

    Restored are modes, rates, buffers, numbers, configurations, random states and counts of calls.
    Dropout and its like stay on with `noise`, checkpoints by functions other than torch's with
    `checkpoints`. The model writes to copies of its buffers and of tensors that its modules keep,
    since the graph of an earlier call may have kept those that it has. Parameters come back too if
    a module's code may write to them: others are not copied, for they are large. So do settings of
    what is `enabled`, which neither looks at padding nor tells anything meanwhile.
    """
    modules = list(model.modules())
    rates = [] if noise else noise_of(model)
    kept: list[Any] = []

    def keep(place: Any, before: Any, new: Any = (), spared: Any = ()) -> None:
        """Note a dict's values to put back, and the types of `new` entries to delete."""
        kept.append((place, {*place, *spared}, before, new))

    if enabled is not None:
        keep(vars(enabled), {name: getattr(enabled, name) for name in _SETTINGS})
        keep(vars(enabled.tally), enabled.tally.counted())
    for module in modules:
        held, parameters = vars(module), module._parameters
        keep(module._buffers, dict(module._buffers))
        # States of its last batch, and rates of noise; and hooks, which transformers adds to record
        # hidden states. FSDP puts gathered parameters there, and takes them away itself.
        data = {n: v for n, v in held.items() if isinstance(v, _DATA) and n not in parameters}
        keep(held, data, _DATA, parameters)
        config = held.get("config")
        if hasattr(config, "problem_type"):  # a loss that finds no kind of one writes its guess
            keep(vars(config), {"problem_type": config.problem_type})
        for name, hooks in held.items():
            if name.startswith("_forward") and isinstance(hooks, dict):
                keep(hooks, {}, object)
    written = [tensor for module in modules for tensor in _tensors_of(module)]
    weights = [(p, p.detach().clone()) for p in _written_by(modules)]
    contents = Contents(model)

    def put_back() -> None:
        for place, names, before, new in kept:
            for name in [n for n, v in place.items() if n not in names and isinstance(v, new)]:
                del place[name]
            place.update(before)
        for parameter, copied in weights:
            if parameter.shape == copied.shape:  # engines that share it out may have taken it back
                parameter.data.copy_(copied)
        contents.put_back()

    def renew_copies() -> None:
        copies: dict[int, Tensor] = {}
        for place, name, tensor in written:
            place[name] = copies.setdefault(id(tensor), tensor.detach().clone())

    # A model that is left without its dropout would train without it.
    undrawn = Pinned() if may_draw_by_itself(model) else contextlib.nullcontext()
    with generators_restored(model), uncounted(modules), afterwards(put_back), undrawn:
        renew_copies()
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        for module in modules:
            # Reentrant checkpointing knows no torch.autograd.grad, by which an audit
            # differentiates. Functions other than torch's may be another. In evaluation
            # bitsandbytes packs 4-bit weights for the CPU, which then pass no gradients on for good.
            held = vars(module)
            function = held.get("_gradient_checkpointing_func")
            own = function is not None and not only_checkpoints(function)
            if held.get("gradient_checkpointing") and not (checkpoints and own):
                held["gradient_checkpointing"] = False
            if held.get("support_avx512bf16_for_cpu"):
                held["support_avx512bf16_for_cpu"] = False
        if enabled is not None:
            enabled.padding_read, enabled.is_audited = None, True
        yield renew_copies


def _tensors_of(module: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield (dict, name, tensor) of the tensors that a module's forward may write to.

    Many whole numbers are weights of a quantised layer, and not copied for their size.
    """
    for name, buffer in module._buffers.items():
        if buffer is not None and (buffer.is_floating_point() or buffer.numel() <= _FEW):
            yield module._buffers, name, buffer
    for name, value in vars(module).items():
        kept = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if kept and value.is_floating_point() and not value.requires_grad:
            yield vars(module), name, value


def _written_by(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return parameters of modules whose code writes to weights, and of children (Gemma 3n)."""
    writing = {kind for kind in {*map(source.class_of, modules)} if source.writes_to_weights(kind)}
    found = [module for module in modules if type(module) in writing]
    held = [
        p
        for module in found
        for part in (module, *module.children())
        for p in part.parameters(recurse=False)
    ]
    return list({id(p): p for p in held if not p.is_meta}.values())
