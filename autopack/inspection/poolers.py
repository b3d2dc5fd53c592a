"""Poolers that are a bare linear layer (ALBERT, BigBird): the backbone hands them the first token of every row.

No hook of theirs sees the tokens of the other documents, so what they gave is made again from the backbone's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_ACTIVATIONS = ("pooler_activation", "activation")


def pools_single_tokens(module: nn.Module) -> bool:
    """Whether a backbone hands its pooler the first token of every row."""
    return isinstance(getattr(module, "pooler", None), nn.Linear)


def activation_of(module: nn.Module) -> Any:
    """What the backbone does to the pooler's output, or None where that is not known."""
    return next((found for name in _ACTIVATIONS if callable(found := getattr(module, name, None))), None)


def pool_documents(module: Any, output: Any, starts: torch.Tensor) -> Any:
    """The output of a backbone with the pooled vector (documents, channels) of each document.

    `starts` are the first tokens of the documents in the flattened rows.
    """
    states = output[0]
    activation = activation_of(module)
    pooled = None  # what it has made of rows is of no document
    if activation is not None:
        pooled = activation(module.pooler(states.reshape(-1, states.shape[-1]).index_select(0, starts)))
    if isinstance(output, tuple):
        return (output[0], pooled, *output[2:])
    return type(output)(**{**output, "pooler_output": pooled})
