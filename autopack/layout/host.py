"""Values of tensors on the host: copied from their device, or known from before they were moved there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopack.errors import UnsupportedModel

_WITHOUT_VALUES = (
    "autopack reads on the host where documents begin, and here position_ids, attention_mask or the like have no "
    "values: the call is recorded (torch.export) or stands for many (torch.vmap). Do that with the stock model, after "
    "`autopack.disable(model)`, or give it tokens alone."
)


def host_values(tensor: torch.Tensor) -> np.ndarray:
    """Copy an integer or boolean tensor of any shape to the host: int64 or bool where it had to be unwrapped.

    Raises `UnsupportedModel` where it has no values: in a call that is recorded (`torch.export`) or stands for many
    (`torch.vmap`).
    """
    host = tensor.detach().cpu()
    try:
        return host.numpy()
    except RuntimeError as error:
        if type(host) is not torch.Tensor:
            raise UnsupportedModel(_WITHOUT_VALUES, code="recorded-call") from error
    try:
        # Tensors of torch.func's derivatives share no memory with numpy, and can be read.
        found = host.tolist()
    except RuntimeError as error:
        raise UnsupportedModel(_WITHOUT_VALUES, code="recorded-call") from error
    return np.array(found, dtype=bool if host.dtype == torch.bool else np.int64).reshape(tuple(host.shape))


_WRITTEN_TO = (
    "autopack: a tensor of a batch was written to after it was moved to this device, by a collective or by its .data, "
    "so documents do not begin where the host has them. Write to a copy of it, and pass that"
)
_ASSERTING = ("cuda",)
"""Kinds of devices that can be told to stop by what they meet."""


class _State(NamedTuple):
    """What tells whether a tensor is still what it was: writing to it counts its version up."""

    version: int
    address: int
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _State | None:
        if tensor.is_inference():
            return None  # counts no versions
        return cls(tensor._version, 0 if tensor.is_meta else tensor.data_ptr(), tensor.shape)


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Known(NamedTuple):
    """What a tensor held when it was remembered."""

    state: _State
    host: torch.Tensor
    there: torch.Tensor | None
    """The same on its device; None where nothing need be compared there, or can be."""

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor holds it now, as far as that can be told without waiting for its device.

        Collectives, `tensor.data` and numpy write to a tensor and count no version up. On a CPU they are seen, and a
        GPU is told to stop where it meets other values, which ends the process before anything is learned from them.
        """
        if self.state != _State.of(tensor):
            return False
        if tensor.device.type == "cpu":
            return torch.equal(tensor, self.host)
        if tensor.is_meta:
            return True
        if self.there is None:
            return False
        torch._assert_async((tensor == self.there).all(), _WRITTEN_TO)
        return True


def remember(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Keep what an integer or boolean tensor holds, `host` on the CPU, while that very tensor lives unchanged."""
    state = _State.of(tensor)
    if state is not None:
        there = tensor.detach().clone() if tensor.device.type in _ASSERTING else None
        _known[tensor] = _Known(state, host.detach().clone(), there)


def recall(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What is known of those tensors among the arguments that were remembered and have not been written to since."""
    found: dict[str, torch.Tensor] = {}
    for name, value in arguments.items() if _known else ():
        if isinstance(value, torch.Tensor) and value in _known and _known[value].is_still(value):
            found[name] = _known[value].host
    return found


_padding: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_padding(tokens: torch.Tensor, real: np.ndarray) -> None:
    """Keep where a batch of tokens is no padding, bool (rows, columns), while that very tensor lives unchanged."""
    state = _State.of(tokens)
    if state is not None and not real.all():
        _padding[tokens] = state, real


def noted_padding(tokens: Any) -> np.ndarray | None:
    """What `note_padding` was told of these tokens; None where it was told nothing, or they were written to since."""
    if not _padding or not isinstance(tokens, torch.Tensor) or tokens not in _padding:
        return None
    state, real = _padding[tokens]
    return real if state == _State.of(tokens) else None


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Integer or boolean tensors on the CPU: as they are remembered, or else copied, all of a device at once."""
    found = {**tensors, **recall(tensors)}
    elsewhere: dict[torch.device, list[str]] = {}
    for name, tensor in found.items():
        if tensor.device.type != "cpu":
            elsewhere.setdefault(tensor.device, []).append(name)
    for names in elsewhere.values():
        flat = torch.cat([found[name].detach().reshape(-1).long() for name in names]).cpu()
        parts = flat.split([found[name].numel() for name in names])
        found |= {name: part.reshape(found[name].shape) for name, part in zip(names, parts, strict=True)}
    return found


class HostBatch(dict[str, Any]):
    """A batch that can be moved to a device without the model having to ask there where its documents begin.

    `HostBatch(batch)` holds what any collator made. An enabled model reads `position_ids`, `attention_mask`, labels
    beside a mask, `seq_idx` and cumulative lengths on the host, and a copy from a GPU waits for all work before it.
    `to` remembers for the moved tensors what they held on the CPU: accelerate, transformers' Trainer and Lightning move
    batches by it, and so does `batch.to("cuda")`. What is computed from a moved tensor, or written to it later, is
    read from the device as ever; what a collective writes to one of a GPU, which torch does not count, stops the
    device with a message. To models that are not enabled it is a dict.
    """

    def to(self, device: Any, non_blocking: bool = False) -> HostBatch:
        """The batch on a device: all that can be moved, in lists, tuples and dicts too; everything else as it is."""
        moved = HostBatch()
        for name, value in self.items():
            moved[name] = there = _moved(value, device, non_blocking)
            if isinstance(value, torch.Tensor) and there is not value and _may_declare(value):
                remember(there, value)
        return moved


def _may_declare(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and not (value.is_floating_point() or value.is_complex())


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, dict):
        return type(value)((name, _moved(part, device, non_blocking)) for name, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_moved(part, device, non_blocking) for part in value)
    return value.to(device) if hasattr(value, "to") else value
