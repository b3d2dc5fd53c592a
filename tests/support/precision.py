"""A mode in which models compute in float64 throughout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    __module__ = "torch.compat"  # in a mode of somebody else's, calls are checked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@contextlib.contextmanager
def float64_throughout() -> Iterator[None]:
    """Lift the casts to float32 that models make in their own code whatever dtype they have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
