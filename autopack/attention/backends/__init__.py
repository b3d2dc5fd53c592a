"""One module for each backend of attention, with its `BACKEND`, whose name is that of the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from autopack.attention.call import AttentionCall, Output
from autopack.layout.prefixes import Prefixes


@dataclass(frozen=True)
class Backend:
    """A way to compute attention within the documents of packed rows.

    `attend` attends within each document. It returns the output (R, C, H, V), and the attention weights (R, H, C, C),
    zero across documents, where they are wanted and the backend can give them. `availability` says whether the backend
    can be used on this machine, and by what or why not; `refusal` why it cannot serve a call, or None where it can.
    `over_prefixes` attends in a row of S tokens that holds once what several documents begin with, (1, S, H, V), and
    gives None for a call for which it cannot.

    `implementations` are the attn_implementations of transformers whose own backend it is, as far as this machine has
    them; `is_own` tells it of any. `stands_in` maps those that it may serve in place of their own backend to what a
    model's class has to declare for that, or None: only then do both compute the same attention. For those of
    `goes_first` `backend="auto"` takes it wherever it can serve a call. `devices` are the kinds of devices on which
    `auto` may take it; `strict` says that asking for it where it is not available is refused at once.
    """

    name: str
    attend: Callable[[AttentionCall], Output]
    availability: Callable[[], tuple[bool, str]]
    refusal: Callable[[AttentionCall], str | None] = lambda call: None
    over_prefixes: Callable[[AttentionCall, Prefixes], torch.Tensor | None] | None = None
    implementations: Callable[[], tuple[str, ...]] = tuple
    is_own: Callable[[str], bool] = lambda implementation: False
    stands_in: Mapping[str, str | None] = field(default_factory=dict)
    goes_first: frozenset[str] = frozenset()
    devices: frozenset[str] | None = None  # None for all
    strict: bool = False
