"""Values of tensors on the host: copied from their device, or known from before they were moved
there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from autopack.errors import UnsupportedModel

_WITHOUT_VALUES = (
    "autopack reads on the host where documents begin, and here position_ids, attention_mask or "
    "the like have no values: the call is recorded (torch.export) or stands for many (torch.vmap). "
    "Do that with the stock model, after `autopack.disable(model)`, or give it tokens alone."
)


def host_values(tensor: Tensor) -> np.ndarray:
    """Return an integer or boolean tensor's values in numpy; raise if it has none.

    They are copied from a device unless they are remembered (`HostBatch`). Tensors of torch.func's
    derivatives give int64 or bool.

    Raises `UnsupportedModel` if it has no values: in a call that is recorded (`torch.export`) or
    stands for many (`torch.vmap`).
    """
    known = recall({"": tensor}) if _known else {}
    host = known.get("", tensor).detach().cpu()
    try:
        return host.numpy()
    except RuntimeError as error:
        # Tensors of torch.func's derivatives share no memory with numpy, and can be read.
        with suppress(RuntimeError):
            if type(host) is Tensor:
                kind = bool if host.dtype == torch.bool else np.int64
                return np.array(host.tolist(), dtype=kind).reshape(tuple(host.shape))
        raise UnsupportedModel(_WITHOUT_VALUES, code="recorded-call") from error


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, without waiting for a GPU."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    # From memory that is not pinned the copy would wait for what the device has to do before it.
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


_WRITTEN_TO = (
    "autopack: a tensor of a batch was written to after it was moved to this device, by a "
    "collective or by its .data, so documents do not begin where the host has them. Write to a "
    "copy of it, and pass that"
)
_ASSERTING = ("cuda",)
"""Kinds of devices that can be told to stop if they meet other values."""


def _version_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a tensor's (version, address, shape), which writes change; None in inference mode."""
    if tensor.is_inference():
        return None
    return tensor._version, 0 if tensor.is_meta else tensor.data_ptr(), tensor.shape


_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Known(NamedTuple):
    """Values of a tensor at the time when it was remembered."""

    state: tuple[Any, ...]
    host: Tensor
    there: Tensor | None
    """The same values on its device; None if no comparison there is needed, or possible."""

    def is_still(self, tensor: Tensor) -> bool:
        """Return True if the tensor still holds these values, as known without a device sync.

        Collectives, `tensor.data` and numpy write to a tensor without increasing its version. On a
        CPU such writes are seen. A GPU is told to stop if it meets other values, which ends the
        process before anything is learned from them.
        """
        if self.state != _version_of(tensor):
            return False
        if tensor.device.type == "cpu":
            return torch.equal(tensor, self.host)
        if tensor.is_meta:
            return True
        if self.there is None:
            return False
        torch._assert_async((tensor == self.there).all(), _WRITTEN_TO)
        return True


def remember(tensor: Tensor, host: Tensor) -> None:
    """Keep `host`, CPU values of an integer or boolean tensor, while the tensor lives unchanged."""
    state = _version_of(tensor)
    if state is not None:
        there = tensor.detach().clone() if tensor.device.type in _ASSERTING else None
        _known[tensor] = _Known(state, host.detach().clone(), there)


def recall(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return, by name, the CPU values of arguments that were remembered and not written to."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items() if _known else ():
        if isinstance(value, Tensor) and value in _known and _known[value].is_still(value):
            found[name] = _known[value].host
    return found


_padding: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_padding(tokens: Tensor, real: np.ndarray) -> None:
    """Keep `real`, False at a batch's padding (rows, columns), while `tokens` live unchanged."""
    state = _version_of(tokens)
    if state is not None and not real.all():
        _padding[tokens] = state, real


def noted_padding(tokens: Any) -> np.ndarray | None:
    """Return the array that `note_padding` kept for `tokens`; None without, or if they changed."""
    if not _padding or not isinstance(tokens, Tensor) or tokens not in _padding:
        return None
    state, real = _padding[tokens]
    return real if state == _version_of(tokens) else None


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return integer or boolean tensors on the CPU; each device's are copied together, as int64."""
    found = dict(tensors)
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        flat = torch.cat([tensor.detach().reshape(-1).long() for tensor in here.values()]).cpu()
        parts = flat.split([tensor.numel() for tensor in here.values()])
        found |= {
            name: part.reshape(tensors[name].shape) for name, part in zip(here, parts, strict=True)
        }
    return found


class HostBatch(dict[str, Any]):
    """A batch whose documents an enabled model reads on the host after it was moved to a device.

    `HostBatch(batch)` holds the batch of any collator. An enabled model reads `position_ids`,
    `attention_mask`, labels beside a mask, `seq_idx` and cumulative lengths on the host, and a copy
    from a GPU waits for all work before it. `to` remembers the CPU values of the tensors that it
    moves: accelerate, transformers' Trainer and Lightning move batches by it, and so does
    `batch.to("cuda")`. Tensors that are computed from a moved one, or written to later, are read
    from the device as ever. If a collective writes to a moved tensor of a GPU, which torch does not
    count, the device stops with a message. To models that are not enabled it is a dict.
    """

    def to(self, device: Any, non_blocking: bool = False) -> HostBatch:
        """Return the batch moved to a device, nested values too; remember its CPU integers."""

        def moved(value: Any) -> Any:
            """Return a value on the device; remember a moved tensor's integers from the CPU."""
            if not isinstance(value, Tensor):
                return value.to(device) if hasattr(value, "to") else value
            there = value.to(device, non_blocking=non_blocking)
            is_number = value.is_floating_point() or value.is_complex()
            if there is not value and value.device.type == "cpu" and not is_number:
                remember(there, value)
            return there

        return HostBatch({name: tree_map(moved, value) for name, value in self.items()})
