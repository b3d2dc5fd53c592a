"""Parts of models found in any type by what they are, and modules of a user's to put in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_MIXERS = ("self_attn", "attn", "attention", "self_attention", "mixer", "mamba")


def layers_of(model: Any) -> nn.ModuleList:
    """The layers of a model."""
    return next(m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0)


def mixer_name(layer: nn.Module) -> str:
    """Name of the part of a layer that mixes tokens."""
    return next(name for name in _MIXERS if hasattr(layer, name))


def norm_name(layer: nn.Module) -> str:
    """Name of the first norm of a layer."""
    return next(name for name, part in layer.named_children() if "norm" in type(part).__name__.lower())


def feed_forward_name(layer: nn.Module) -> str:
    """Name of the last part of a layer that has parameters and is no norm: of its feed-forward network, mostly."""
    parts = dict(layer.named_children()).items()
    return [n for n, part in parts if "norm" not in type(part).__name__.lower() and len(list(part.parameters()))][-1]


def place(model: Any, where: str) -> tuple[Any, Any]:
    """The holder of a part of a model, and the name (or number) that it has there."""
    layers = layers_of(model)
    if where == "layer":
        return layers, 0
    if where == "mixer":
        return layers[0], mixer_name(layers[0])
    if where == "norm":
        return layers[0], norm_name(layers[0])
    if where == "feed-forward":
        return layers[0], feed_forward_name(layers[0])
    part = model.get_input_embeddings() if where == "embedding" else model.get_output_embeddings()
    for holder in model.modules():
        for name, child in holder.named_children():
            if child is part:
                return holder, name
    raise AssertionError(f"{type(model).__name__} holds no {where}")


def get(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(name, int) else getattr(holder, name)


def put(holder: Any, name: Any, part: nn.Module) -> None:
    if isinstance(name, int):
        holder[name] = part
    else:
        setattr(holder, name, part)


class Wrapped(nn.Module):
    """A part of a model inside a module of the user's, which does something with the states that it gives."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)  # models ask layers and embeddings for attributes

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if isinstance(output, tuple):
            return (self.change(output[0]), *output[1:])
        return self.change(output) if output.dim() > 2 else self.change(output[None])[0]  # OPT flattens its rows


class Scales(Wrapped):
    """Token by token."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(states) + 0.5 * states


class Shifts(Wrapped):
    """A convolution over two tokens."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


class Accumulates(Wrapped):
    """A mean over all tokens so far."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states + states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[:, None]


class Centres(Wrapped):
    """A statistic over all tokens of the batch, as of BatchNorm in training."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean((0, 1))


class Attends(Wrapped):
    """Attention of the user's own, which no interface knows of."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)


class Counts(Wrapped):
    """A position of the column, not of the document."""

    def change(self, states: torch.Tensor) -> torch.Tensor:
        return states * (1 + 0.1 * torch.arange(states.shape[1], dtype=states.dtype)[:, None])


HARMLESS = (Wrapped, Scales)
MIXING = (Shifts, Accumulates, Centres, Attends, Counts)
PLACES = ("mixer", "feed-forward", "norm", "layer", "embedding", "head")
