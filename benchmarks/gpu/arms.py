"""The arms that are compared: the same documents, labels and model, called in different ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import autopack
from autopack.attention import choose
from autopack.bench.batches import Batch
from benchmarks.gpu import by_hand
from compat.standins import set_implementation

PADDED, GROUPED, ROW, BOUNDS = "padded", "grouped", "row", "row with bounds"


@dataclass(frozen=True)
class Arm:
    """One way to run documents: an attention implementation, the form of its batches, and whether autopack is on."""

    name: str
    implementation: str
    form: str
    enabled: bool

    @property
    def packed(self) -> bool:
        """Whether its batches are packed rows."""
        return self.form in (ROW, BOUNDS)


ARMS = (
    Arm("padded", "sdpa", PADDED, False),
    Arm("padded, grouped by length", "sdpa", GROUPED, False),
    Arm("stock packed sdpa", "sdpa", ROW, False),
    Arm("stock packed flash", "flash_attention_2", BOUNDS, False),
    Arm("stock packed flash by positions", "flash_attention_2", ROW, False),
    Arm("varlen_attn by hand", by_hand.NAME, BOUNDS, False),
    Arm("enabled", "sdpa", ROW, True),
    Arm("enabled, flash", "flash_attention_2", ROW, True),
    Arm("enabled, padded batch", "sdpa", PADDED, True),
)
"""`stock packed flash` is given cumulative and longest lengths made beforehand; `enabled` finds them in each call, as
stock does of `position_ids` alone in every layer (padding-free training, as in TRL). `varlen_attn by hand` is torch's
kernel in an attention function of one's own."""
FLEX = (
    Arm("stock packed flex", "flex_attention", ROW, False),
    Arm("enabled, flex", "flex_attention", ROW, True),
)
"""They compile a kernel for each length of a row, which takes a minute: for the smallest sizes alone."""


def call_of(batch: Batch, arm: Arm) -> dict[str, Any]:
    """The arguments of a call in the form of an arm, on the device."""
    # A packed row of an enabled model has no cache anyway; whoever pads has to say that none is wanted.
    stock = {} if arm.enabled and arm.packed else {"use_cache": False}
    if not arm.packed:
        return {**batch.padded(), **stock}
    row = batch.row()
    if arm.form == BOUNDS:
        bounds = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32).to(batch.ids.device)
        longest = max(batch.lengths)
        row |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {**row, **stock}


def by_document(batch: Batch, arm: Arm, output: torch.Tensor) -> list[torch.Tensor]:
    """What an output (rows, columns, ...) of an arm says of each document."""
    if arm.packed:
        return list(output[0].split(batch.lengths))
    return [row[:length] for row, length in zip(output, batch.lengths, strict=True)]


def backend_of(arm: Arm) -> str:
    """The backend that an enabled arm asks for: the one that `auto` takes on a GPU, by name, so that it is that one."""
    if arm.implementation != "sdpa":
        return "flex" if arm in FLEX else "flash"
    return "varlen" if choose.availability()["varlen"][0] else "auto"


@contextlib.contextmanager
def on(arm: Arm, model: Any) -> Iterator[autopack.Handle | None]:
    """Put a model into the state of an arm, and take autopack off again; yields its handle where it is on."""
    set_implementation(model, arm.implementation)
    if not arm.enabled:
        with by_hand.registered() if arm.implementation == by_hand.NAME else contextlib.nullcontext():
            yield None
        return
    # verify=False: an audit at every change of arms would take the time, and these arms are compared anyway
    with autopack.enable(model, backend=backend_of(arm), verify=False) as handle:
        yield handle
