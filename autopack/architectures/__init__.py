"""What is known about architectures: one file per family, each holding one frozen `FAMILY`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopack.patching import Site

__all__ = ["Family"]


def _serves_every_config(config: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Family:
    """One way of serving a set of architectures.

    `model_types` are those that a run of the leak test has covered; a model of another type that has the same structure
    is audited when it is enabled. `adjustments` map the class name of an attention module to a function that takes
    (module, layout, query, key, value, options) and returns the last four as a document alone would have them.
    `sites` are further functions of transformers to stand at while a model of the family is enabled.
    `mixers` are class names of modules that mix tokens by recurrence or convolution; they start anew at every document.
    `dense_types` score every pair of tokens of a row in code of their own: a row costs the square of its length.
    `refusal` says why a config cannot be served, or None; `refused_types` are model types that cannot be served at all,
    with the reason.
    """

    name: str
    model_types: frozenset[str]
    path: str
    adjustments: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    mixers: frozenset[str] = frozenset()
    dense_types: frozenset[str] = frozenset()
    refusal: Callable[[Any], str | None] = _serves_every_config
    refused_types: Mapping[str, str] = field(default_factory=dict)
