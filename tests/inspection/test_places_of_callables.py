"""Whatever place of a covered model somebody puts code at that mixes tokens: the call is exact, or an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import autopack
from autopack import tiny

LENGTHS = (5, 9, 3, 8)
EXACT, LEAK = 1e-4, 1e-2
"""Of the deviation of logits in float32: rounding leaves about 1e-6, and what leaks here starts near 0.1."""
TYPES = ("llama", "qwen3", "gpt2", "phi", "mixtral", "gemma2", "mamba", "opt")


def mixed(value: Any) -> Any:
    """Every token gets something of those before it, also of other documents; anything else stays as it is."""
    if isinstance(value, tuple):
        return (mixed(value[0]), *value[1:])
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[1] > 1:
        return value + 0.3 * value.cumsum(1)
    return value


def by_forward(module: nn.Module) -> None:
    inner = module.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixed(inner(*args, **kwargs))

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def by_partial(module: nn.Module) -> None:
    inner = module.forward
    module.forward = functools.partial(lambda function, *a, **k: mixed(function(*a, **k)), inner)  # type: ignore[method-assign]


def by_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: mixed(output))


def by_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: tuple(map(mixed, args)))


def by_class(module: nn.Module) -> None:
    cls = type(module)

    class Mine(cls):  # type: ignore[valid-type,misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return mixed(super().forward(*args, **kwargs))

    module.__class__ = Mine


def by_wrapper(module: nn.Module) -> None:
    """Each child that takes one tensor becomes a module of one's own around it."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity)) or "Norm" in type(child).__name__:
            setattr(module, name, Around(child))


class Around(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:  # models read weights of their parts
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return mixed(self.inner(states))


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "a method on the instance": by_forward,
    "a partial on the instance": by_partial,
    "a forward hook": by_hook,
    "a forward pre-hook": by_pre_hook,
    "another class": by_class,
    "a module around its parts": by_wrapper,
}


@functools.cache
def documents(model_type: str) -> list[torch.Tensor]:
    return [tiny.tokens(tiny.config(model_type), length, seed=length)[None] for length in LENGTHS]


@torch.no_grad()
def alone(model: Any, ids: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=one, use_cache=False).logits[0] for one in ids])


@torch.no_grad()
def packed(model: Any, ids: list[torch.Tensor]) -> torch.Tensor:
    where = torch.cat([torch.arange(one.shape[1]) for one in ids])[None]
    return model(input_ids=torch.cat(ids, 1), position_ids=where, use_cache=False).logits[0]


def put(model: Any, place: int, way: str) -> str:
    """Put code that mixes at a module of the model, and say where."""
    found = [(name, module) for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)]
    name, module = found[place % len(found)]
    WAYS[way](module)
    return name or "the model"


def test_what_mixes_tokens_is_never_silent():
    """Where nothing passes between documents (a module that is never called, of one token), it is served."""
    outcomes: set[str] = set()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        model_type=st.sampled_from(TYPES),
        place=st.integers(0, 60),
        way=st.sampled_from(sorted(WAYS)),
        after=st.booleans(),
    )
    def is_refused_or_exact(model_type, place, way, after):
        ours, stock = tiny.build(model_type), tiny.build(model_type)
        ids = documents(model_type)
        where = put(stock, place, way)
        expected = alone(stock, ids)
        try:
            if not after:
                put(ours, place, way)
            with autopack.enable(ours):
                if after:
                    packed(ours, ids)  # served until then
                    put(ours, place, way)
                found = packed(ours, ids)
        except autopack.AutopackError:
            outcomes.add("refused")
            return
        error = float((found - expected).abs().max() / expected.std())
        outcomes.add("exact")
        assert error <= EXACT, f"{where}: {error:.1e}"

    is_refused_or_exact()
    assert outcomes == {"refused", "exact"}


@pytest.mark.parametrize("way", WAYS)
def test_without_a_proof_it_is_silent(way):
    """The control: a layer's feed-forward, and nobody looks."""
    ours, stock = tiny.build("llama"), tiny.build("llama")
    for model in (ours, stock):
        WAYS[way](model.model.layers[0].mlp)
    ids = documents("llama")
    with autopack.enable(ours, verify=False):
        found = packed(ours, ids)
    expected = alone(stock, ids)
    assert float((found - expected).abs().max() / expected.std()) > LEAK
