"""Generators of random numbers that a forward may draw from (torch's, Python's, numpy's), and putting back."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def afterwards(put_back: Callable[[], None]) -> Iterator[None]:
    """Call `put_back` at the end of the block; where it is interrupted it is called again, not to be left half done."""
    try:
        yield
    finally:
        try:
            put_back()
        except BaseException:
            put_back()
            raise


def state_of(module: nn.Module) -> list[Any]:
    """What every generator is at that a forward of a module may draw from; comparable by `==`."""
    name, keys, *rest = np.random.get_state()
    states = [torch.get_rng_state(), *(_at(*device, "get_rng_state") for device in _devices_of(module))]
    return [*(state.numpy().tobytes() for state in states), random.getstate(), name, np.asarray(keys).tobytes(), *rest]


@contextmanager
def drawing_nothing(module: nn.Module) -> Iterator[None]:
    """Leave all generators that a forward of a module may draw from as they are found, whatever is drawn inside."""
    devices = _devices_of(module)
    of_cpu, others = torch.get_rng_state(), [_at(*device, "get_rng_state") for device in devices]
    of_python, of_numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        torch.set_rng_state(of_cpu)
        for device, state in zip(devices, others, strict=True):
            _at(*device, "set_rng_state", state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    with afterwards(put_back):
        yield


def _devices_of(module: nn.Module) -> list[tuple[str, int]]:
    """The kinds and numbers of the devices of a module that have generators of their own, which the CPU has not."""
    found = {(p.device.type, p.device.index or 0) for p in module.parameters()}
    return sorted(device for device in found if hasattr(getattr(torch, device[0], None), "get_rng_state"))


def _at(kind: str, number: int, function: str, *state: Tensor) -> Any:
    found = getattr(getattr(torch, kind), function)
    # There is one MPS, and in earlier releases its functions take no number.
    return found(*state, number) if "device" in inspect.signature(found).parameters else found(*state)
