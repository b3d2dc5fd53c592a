"""A narrower module with another one's code: every size of its weights is divided by one number.

A module's treatment of tokens follows from its code, not from its width, as for a model's twin. A
layer of a large model takes seconds, and hundreds of megabytes, to run; one of a few hundred
channels does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autopack.integrations import accelerate
from autopack.tiny.models import randomize

_WIDE, _NARROW = 256, 96
"""Smallest size to divide (exclusive), and smallest result."""


def narrowed(module: nn.Module, widths: Iterable[int] = ()) -> tuple[nn.Module, list[int]] | None:
    """Return a narrower copy of a module, random float32 weights on the CPU, and its `widths`.

    None if its sizes have no divisor. Sizes that it holds beside its weights (`in_features`,
    `normalized_shape`) are divided too. The copy may not run if its code has sizes of another kind.
    Modules whose weights are not plain floating-point tensors (quantised or distributed) have none.
    """
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    if not all(type(t) in (nn.Parameter, torch.Tensor) and t.is_floating_point() for t in tensors.values()):
        return None
    divisor = _divisor({size for tensor in tensors.values() for size in tensor.shape if size > _WIDE})
    if divisor is None:
        return None
    memo = {key: _smaller(tensor, divisor) for key, tensor in tensors.items()}
    try:
        made = accelerate.without_hooks(module, memo)
    except Exception:  # what somebody has put on it may not let itself be copied
        return None
    for part in made.modules():
        for name, value in list(vars(part).items()):
            if not name.startswith("_"):
                part.__dict__[name] = _held(value, divisor)
    randomize(made, 0)
    return made, [_divided(width, divisor) for width in widths]


def _divisor(sizes: set[int]) -> int | None:
    """Return the largest power of two that divides all sizes to distinct, not too small ones."""
    found = [n for n in (2**power for power in range(1, 12)) if all(s % n == 0 and s // n >= _NARROW for s in sizes)]
    return found[-1] if sizes and found else None


def _divided(size: int, divisor: int) -> int:
    return size // divisor if size > _WIDE and size % divisor == 0 else size


def _held(value: Any, divisor: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return _divided(value, divisor)
    if type(value) in (list, tuple, torch.Size):
        return type(value)(_held(each, divisor) for each in value)
    return value


def _smaller(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    made = torch.zeros([_divided(size, divisor) for size in tensor.shape])
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
