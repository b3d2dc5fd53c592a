"""What is known about architectures: one file per family, each holding one frozen `FAMILY`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopack.patching import Site

if TYPE_CHECKING:
    from autopack.mixers import Way

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
    `mixers` map the class name of a module that mixes tokens by recurrence or convolution to the way in which it starts
    anew at every document.
    `attends` says whether any of its types has attention through transformers' interface.
    `positions` says whether its models with attention take position_ids; where they do not, what counts columns is
    among the mixers.
    `dense_types` score every pair of tokens of a row in code of their own: a row costs the square of its length.
    `media_types` map a kind of media ("image", "video", "sound", "protein") to those among all model types that a run
    of the leak test has covered with it in the documents; with other media, packed rows are refused.
    `refused_arguments` are those that no call may bring with packed rows, with the reason.
    `refusal` says why a config cannot be served, or None; `refused_types` are model types that cannot be served at all,
    with the reason.
    """

    name: str
    model_types: frozenset[str]
    path: str
    adjustments: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    mixers: Mapping[str, Way] = field(default_factory=dict)
    attends: bool = True
    positions: bool = True
    dense_types: frozenset[str] = frozenset()
    media_types: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refused_arguments: Mapping[str, str] = field(default_factory=dict)
    refusal: Callable[[Any], str | None] = _serves_every_config
    refused_types: Mapping[str, str] = field(default_factory=dict)
