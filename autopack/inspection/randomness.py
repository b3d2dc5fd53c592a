"""Random generators that a forward may draw from (torch's, Python's, numpy's); restoring them."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopack.inspection.foreign import functions_on, hooks_of, is_of_library, is_own
from autopack.inspection.source import class_of


@contextmanager
def afterwards(put_back: Callable[[], None]) -> Iterator[None]:
    """Call `put_back` at the end of the block, again if interrupted: never leave it half done."""
    try:
        yield
    finally:
        try:
            put_back()
        except BaseException:
            put_back()
            raise


def set_entries(held: Any, tensors: dict[str, Any]) -> None:
    """Set entries of a module's dict of tensors, or of torch.jit's stand-in for one."""
    for name, tensor in tensors.items():
        held[name] = tensor


def _generators(module: nn.Module) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield (get state, set state) of each generator that a module's forward may draw from."""
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    yield np.random.get_state, np.random.set_state
    for kind, number in _devices_of(module):
        space = getattr(torch, kind)
        # There is one MPS, and in earlier releases its functions take no number.
        numbered = "device" in inspect.signature(space.get_rng_state).parameters
        given = {"device": number} if numbered else {}
        yield partial(space.get_rng_state, **given), partial(space.set_rng_state, **given)


def _devices_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return (kind, number) of a module's devices with their own generators; never the CPU."""
    found = {(p.device.type, p.device.index or 0) for p in module.parameters()}
    return sorted(
        device for device in found if hasattr(getattr(torch, device[0], None), "get_rng_state")
    )


def state_of(module: nn.Module) -> list[Any]:
    """Return the state of each generator that a module's forward may draw from; compare by `==`."""
    states = [state() for state, _ in _generators(module)]
    return [
        s.tolist() if isinstance(s, Tensor) else [np.asarray(part).tolist() for part in s]
        for s in states
    ]


@contextmanager
def generators_restored(module: nn.Module) -> Iterator[None]:
    """Restore, at the end of the block, all generators that a forward of a module may draw from."""
    states = [(put, state()) for state, put in _generators(module)]

    def put_back() -> None:
        for put, state in states:
            put(state)

    with afterwards(put_back):
        yield


class Pinned(TorchFunctionMode):
    """A mode of torch in which every draw is the quantile at `share` of its distribution.

    Dropout returns its input. Coins return their probability unless the share is near 0 or 1. Equal
    numbers are sorted by chance: a random order mixes tokens, and must not look like none.
    """

    def __init__(self, share: float = 0.6):
        super().__init__()
        self._share = share

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what a torch function or its stand-in does, with draws set to the pinned value."""
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in _STAND_INS:
            return _STAND_INS[name](*args, **given)
        if name in _ORDERING and args:
            args = (_without_ties(args[0]), *args[1:])
        found = func(*args, **given)
        if name in _DRAWN and isinstance(found, Tensor):
            found.detach().copy_(
                torch.as_tensor(_DRAWN[name](self._share, *args, **given)).detach()
            )
        return found


def normal_numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return normal numbers of a shape, float32 on the CPU, also while draws are `Pinned`."""
    with torch._C.DisableTorchFunction():
        return torch.randn(shape, generator=generator)


def _without_ties(values: Tensor) -> Tensor:
    """Return values, with noise of rounding size added if most of them are equal."""
    ordered = values.detach().flatten().sort().values
    if (
        not values.is_floating_point()
        or int(ordered.diff().count_nonzero()) * 2 >= len(ordered) - 1
    ):
        return values
    return (
        values
        + torch.rand_like(values) * values.detach().abs().max() * 8 * torch.finfo(values.dtype).eps
    )


def _unchanged(input: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the input unchanged, in place of dropout."""
    return input


def _softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0, dim: int = -1
) -> Tensor:
    """Return a softmax without noise, in place of a Gumbel softmax."""
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    return (
        torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
        - soft.detach()
        + soft
    )


def _uniform(
    share: float, drawn: Tensor, start: float = 0.0, end: float = 1.0, **given: Any
) -> float:
    """Return the number at `share` between the bounds, in place of a uniform draw."""
    low, high = given.get("from", start), given.get("to", end)
    return low + (high - low) * share


def _normal(share: float, mean: Any = 0.0, std: Any = 1.0, *_: Any, **__: Any) -> Any:
    """Return the quantile at `share`, in place of a normal draw."""
    return mean + std * NormalDist().inv_cdf(share)


def _coin(share: float, input: Tensor, p: Any = None, **_: Any) -> Any:
    """Return the probability in place of a Bernoulli draw, or an outcome at `share` near 0 or 1."""
    chance = torch.as_tensor(input if p is None else p)
    return chance if 0.01 < share < 0.99 else chance > share


_DROPPING = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
_STAND_INS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys((*_DROPPING, *(f"{name}_" for name in _DROPPING), "poisson"), _unchanged),
    "gumbel_softmax": _softmax,
}
_DRAWN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda share, *_, **__: share),
    **dict.fromkeys(("randn", "randn_like"), lambda share, *_, **__: _normal(share)),
    "normal": _normal,
    "normal_": lambda share, drawn, *args, **given: _normal(share, *args, **given),
    "uniform_": _uniform,
    "bernoulli": _coin,
    "bernoulli_": lambda share, drawn, p=0.5, **_: _coin(share, drawn, p),
    "exponential_": lambda share, drawn, lambd=1.0, **_: -math.log1p(-share) / lambd,
}
"""The value that each function draws at a share; its other arguments are torch's."""
_ORDERING = frozenset(("sort", "msort", "argsort", "topk"))


def may_draw_by_itself(module: nn.Module) -> bool:
    """Return True if a module has third-party functions or hooks, in any part: they may draw."""
    parts = list(module.modules())
    bases = {base for part in parts for base in class_of(part).__mro__ if not is_of_library(base)}
    members = [value for base in bases for value in vars(base).values()]
    put_on = [value for part in parts for _, _, value in functions_on(part)]
    hooks = [hook for part in parts for hook in hooks_of(part).values()]
    return not all(map(is_own, (*members, *put_on, *hooks)))
