"""Generators of random numbers that a forward may draw from (torch's, Python's, numpy's), and putting back."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopack.inspection.code_origin import is_own_file, layers
from autopack.inspection.source import names_in


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


class WithoutDraws(TorchFunctionMode):
    """Torch's functions, of which those that draw for each number of a tensor draw nothing.

    Dropout gives what it gets; noise is the mean of its distribution.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what stands for it."""
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in _DROPPING:
            return args[0] if args else given["input"]
        if name in _MEANS:
            found = func(*args, **given)
            mean = _MEANS[name](*args[1:], **given) if name.endswith("_") else _MEANS[name]()
            return found.fill_(mean)
        if name == "rrelu":
            lower = args[1] if len(args) > 1 else given.get("lower", 1 / 8)
            upper = args[2] if len(args) > 2 else given.get("upper", 1 / 3)
            return nn.functional.leaky_relu(args[0], (lower + upper) / 2)
        return func(*args, **given)


def _uniform_mean(start: float = 0.0, end: float = 1.0, **given: Any) -> float:
    return (given.get("from", start) + given.get("to", end)) / 2


_DROPPING = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"))
_MEANS: dict[str, Callable[..., float]] = {
    "randn_like": lambda: 0.0,
    "rand_like": lambda: 0.5,
    "normal_": lambda mean=0.0, std=1.0, **_: mean,
    "uniform_": _uniform_mean,
}


@cache
def draws_by_itself(cls: Any) -> bool:
    """Return whether a function of a third-party class names one of torch's that draws, or the class is RReLU."""
    codes = [
        layer.__code__
        for base in cls.__mro__
        for value in vars(base).values()
        for layer in layers(value)
        if isinstance(layer, FunctionType) and not is_own_file(layer.__code__.co_filename)
    ]
    return issubclass(cls, nn.RReLU) or any(not _DRAWING.isdisjoint(names_in(code)) for code in codes)


_DRAWING = frozenset((*_DROPPING, *_MEANS, "rrelu"))
