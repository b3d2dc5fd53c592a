"""Run a model as stock, in double precision, without noise, or with a hook on every module, and
leave it as it was found."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel

from autopack.attention.rotary import reset_frequencies
from autopack.auditing.compare import Arguments, Fields, how_far
from autopack.auditing.fields import Sides, fields_of
from autopack.inspection import source
from autopack.inspection.fingerprint import only_checkpoints
from autopack.inspection.modules import row_dependent_rotaries
from autopack.inspection.randomness import (
    Pinned,
    afterwards,
    generators_restored,
    may_draw_by_itself,
    normal_numbers,
)
from autopack.inspection.state import Contents
from autopack.integrations.accelerate import in_their_own_precision
from autopack.integrations.opacus import uncounted
from autopack.runtime import scope
from autopack.runtime.marks import enabled_in
from autopack.runtime.model import EnabledModel

_MOST_BYTES = 2**31
"""Largest memory, in bytes, of weights in double precision beside a model's own."""
_DATA = (Tensor, int, float, str, type(None))
_SETTINGS = ("live", "padding_read", "is_audited", "options")
"""Attributes of an enabled model that a run of it may be given others of."""
_FEW = 1_000_000
"""Number of whole numbers up to which a buffer counts something, or says where something is."""


@contextlib.contextmanager
def stock_again(model: nn.Module) -> Iterator[None]:
    """Run a block as stock, after rotaries have forgotten earlier calls' longest position."""
    enabled = enabled_in(model)
    with contextlib.nullcontext() if enabled is None else scope.stock(enabled):
        forget_lengths(model)
        yield


def run_as_stock(model: nn.Module, arguments: Arguments) -> Any:
    """Return stock's output of a call, unaffected by earlier calls."""
    with stock_again(model):
        return model(**arguments)


@torch.no_grad()
def in_used_tensors(model: nn.Module, arguments: Arguments) -> Arguments:
    """Run the model on reversed rows; return the arguments, copied into the same tensors.

    Programs write batches into the same tensors, for a captured graph or to save memory.
    """
    used = {name: value.flip(0) for name, value in arguments.items() if isinstance(value, Tensor)}
    model(**arguments | used)
    for name, tensor in used.items():
        tensor.copy_(arguments[name])
    return arguments | used


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters that require gradients and are not empty."""
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def gradients_of(sums: Tensor, by: Sequence[Tensor], weights: Tensor | None = None) -> list[Any]:
    """Return gradients of `sums` (by `weights` if several) for the tensors `by`; 0 where unused."""
    # Documents alone are in the graphs of several call modes.
    found = torch.autograd.grad(
        sums, by, weights, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return list(found)


def forget_lengths(model: nn.Module) -> None:
    """Reset rotary frequencies that depend on the longest position of earlier calls, in place."""
    for rotary in row_dependent_rotaries(model):
        one = torch.zeros(1, 1, dtype=torch.long, device=next(rotary.buffers()).device)
        kinds = rotary.__dict__.get("rope_type")
        for kind in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            reset_frequencies(rotary, {"x": one[0].float(), "position_ids": one, **kind})


def weighted_sum(documents: list[Fields], scales: dict[str, float]) -> Tensor | None:
    """Return the sum of documents' fields by fixed random weights; None if none has gradients."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for document in documents:
        for name in sorted(document.keys() & scales.keys()):
            value = document[name]
            if value.requires_grad:
                weights = normal_numbers(value.shape, generator).to(value)
                # What stands for minus infinity at padding has no gradient, and would swallow all
                # else.
                shown = value.where(value.detach().abs() < 1e30, torch.zeros_like(value))
                parts.append((shown * weights).sum() / scales[name])
    return torch.stack([part.double() for part in parts]).sum() if parts else None


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of most of a model's parameters, by their elements."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def can_be_doubled(model: nn.Module) -> bool:
    """Return True if all weights are plain, whole in this process, uncompiled, and fit in float64.

    Code that is compiled for other weights may come to torch's limit, and run uncompiled from then
    on."""
    weights = list(model.parameters())
    plain = all(
        type(p) is nn.Parameter and not p.is_meta and not hasattr(p, "ds_id") for p in weights
    )
    wrapped = (cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    whole = not any(name.startswith("torch.distributed.") for name in wrapped)
    compiled = any(vars(module).get("_compiled_call_impl") for module in model.modules())
    return plain and whole and not compiled and sum(p.numel() for p in weights) * 8 <= _MOST_BYTES


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Run a block with parameters and buffers in float64, and restore the model's own."""
    doubled = {
        name: nn.Parameter(held.detach().double(), held.requires_grad)
        if isinstance(held, nn.Parameter)
        else held.double()
        for name, held in (*model.named_parameters(), *model.named_buffers())
        if held.is_floating_point()
    }
    with _reparametrize_module(model, doubled, tie_weights=True):
        yield


@contextlib.contextmanager
def listening(hook: Callable[[nn.Module, dict[Any, Any], Any], Any]) -> Iterator[None]:
    """Call `hook(module, arguments, output)` after every module that this thread runs in a block.

    `arguments` are by place or name. It is a global hook of the process: a model would be looked at
    again for one on a module.
    """
    thread = threading.get_ident()

    def called(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        return (
            hook(module, {**dict(enumerate(args)), **kwargs}, output)
            if threading.get_ident() == thread
            else None
        )

    handle = register_module_forward_hook(called, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def first_that_moves(
    model: nn.Module, runs: Sequence[Callable[[], Any]], sides: Sides, touched: np.ndarray
) -> str | None:
    """Return in words the first module that mixes documents, by name and class; None if unknown.

    In the second of two `runs` the documents (documents,) that are `touched` are replaced. The
    module gives the other documents another output from the same input.
    """
    names = {module: name for name, module in model.named_modules()}

    def keep(value: Any) -> Fields:
        """Return copies of the untouched documents' parts of a value."""
        return {
            name: part.clone()
            for name, each in fields_of(value).items()
            if each.dim() > 1 and (part := sides.part(name, each, ~touched)) is not None
        }

    def heard(run: Callable[[], Any]) -> list[tuple[nn.Module, Fields, Fields]]:
        """Return (module, input, output) of each module in a run."""
        found: list[tuple[nn.Module, Fields, Fields]] = []
        with listening(
            lambda module, given, output: found.append((module, keep(given), keep(output)))
        ):
            run()
        return found

    def differs(one: Fields, two: Fields) -> bool | None:
        """Return True if fields differ beyond rounding; None if they are not comparable."""
        if not one or one.keys() != two.keys():
            return None
        return any(how_far(name, one[name], two[name]).excess > 1 for name in one)

    with torch.no_grad(), contextlib.suppress(Exception):  # what mixes is said in any case
        for (module, given, output), (other, *others) in zip(*map(heard, runs), strict=False):
            same_place = module is other and module in names
            if same_place and differs(output, others[1]) and differs(given, others[0]) is False:
                return f"{names[module] or 'the model'}, of the class {type(module).__name__}"
    return None


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
        kept.append((place, {*place.keys(), *spared}, before, new))

    if enabled is not None:
        keep(vars(enabled), {name: getattr(enabled, name) for name in _SETTINGS})
        keep(vars(enabled.tally), enabled.tally.counted())
    for module in modules:
        # torch.jit has stand-ins for these dicts, which are read by `keys()` and have no `update`
        held, parameters = vars(module), {*module._parameters.keys()}
        keep(module._buffers, dict(module._buffers))
        # States of its last batch, and rates of noise; and hooks, which transformers adds to record
        # hidden states. FSDP puts gathered parameters there, and takes them away itself.
        data = {n: v for n, v in held.items() if isinstance(v, _DATA) and n not in parameters}
        keep(held, data, _DATA, parameters)
        config: Any = held.get("config")
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
            for name, value in before.items():
                place[name] = value
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
            # bitsandbytes packs 4-bit weights for the CPU, which pass no gradients on for good.
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
