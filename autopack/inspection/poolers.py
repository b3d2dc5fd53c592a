"""Poolers that are a bare linear layer (ALBERT, BigBird): the backbone hands them the first token of every row.

No hook of theirs sees the tokens of the other documents, so what they gave is made again from the backbone's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def pools_single_tokens(module: nn.Module) -> bool:
    """Whether a backbone hands its pooler the first token of every row."""
    return isinstance(getattr(module, "pooler", None), nn.Linear)


def activation_of(module: nn.Module) -> Any:
    """What the backbone does to the pooler's output, or None where that is not known."""
    found = [getattr(module, name, None) for name in ("pooler_activation", "activation")]
    return next(filter(callable, found), None)


def pool_documents(module: Any, output: Any, starts: torch.Tensor) -> Any:
    """The output of a backbone with the pooled vector (documents, channels) of each document.

    `starts` are the first tokens of the documents in the flattened rows.
    """
    activation, pooled = activation_of(module), None  # what it has made of rows is of no document
    if activation is not None:
        pooled = activation(module.pooler(output[0].flatten(0, 1).index_select(0, starts)))
    if isinstance(output, tuple):
        return (output[0], pooled, *output[2:])
    return type(output)(**{**output, "pooler_output": pooled})
