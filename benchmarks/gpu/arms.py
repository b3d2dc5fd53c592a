"""The arms that are compared: the same documents, labels and model, called in different ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

import autopack
from autopack.attention import choose
from autopack.bench.race import PADDED, ROW, Arm, Batch, calls_of
from autopack.packing import CostModel
from autopack.steps.deal import deal
from benchmarks.gpu import by_hand
from compat.standins import set_implementation, taken_for_kernels

GROUPED, BOUNDS, REGROUPED = "grouped", "row with bounds", "regrouped"
FLASH = Arm("stock packed flash", BOUNDS, False, "flash_attention_2")
ARMS = (
    Arm("padded", PADDED, False),
    Arm("padded, grouped by length", GROUPED, False),
    Arm("stock packed sdpa", ROW, False),
    FLASH,
    Arm("stock packed flash by positions", ROW, False, "flash_attention_2"),
    Arm("varlen_attn by hand", BOUNDS, False, by_hand.NAME),
    Arm("enabled", ROW, True),
    Arm("enabled, flash", ROW, True, "flash_attention_2"),
    Arm("enabled, padded batch", PADDED, True),
    Arm("enabled, regrouped", REGROUPED, True),
)
"""`stock packed flash` is given cumulative and longest lengths made beforehand; `enabled` finds
them in each call, as stock does of `position_ids` alone in every layer (padding-free training, as
in TRL). `varlen_attn by hand` is torch's kernel in an attention function of one's own. `enabled,
regrouped` cuts all batches anew, as `max_tokens` cuts a step, into rows of as many tokens as the
largest padded batch has columns."""


def calls(arm: Arm, model: Any, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the arguments of a call for each batch, in the form of an arm, on the device."""
    if arm.form == GROUPED:
        return calls_of(replace(arm, form=PADDED), model, grouped(batches))
    if arm.form == REGROUPED:
        most = max(len(batch.lengths) * max(batch.lengths) for batch in batches)
        return calls_of(replace(arm, form=ROW), model, regrouped(batches, most))
    found = calls_of(arm, model, batches)
    for call, batch in zip(found, batches, strict=True) if arm.form == BOUNDS else ():
        bounds = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32).to(
            call["input_ids"].device
        )
        longest = max(batch.lengths)
        call |= {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return found


def grouped(batches: Sequence[Batch]) -> list[Batch]:
    """Return the same documents in as many batches, by length, as a trainer's `group_by_length`
    makes them."""
    documents, size = (
        sorted((each for batch in batches for each in batch.documents), key=len),
        len(batches[0].lengths),
    )
    return [Batch(documents[first : first + size]) for first in range(0, len(documents), size)]


def regrouped(batches: Sequence[Batch], most: int) -> list[Batch]:
    """Return the same documents in rows of at most `most` tokens, as `max_tokens` cuts them on one
    rank."""
    documents = [each for batch in batches for each in batch.documents]
    rows = deal([*map(len, documents)], [0] * len(documents), 1, most, CostModel())[0]
    return [Batch([documents[number] for number in row]) for row in rows]


def is_packed(arm: Arm) -> bool:
    """Return True if the batches of an arm are packed rows."""
    return arm.form not in (PADDED, GROUPED)


def by_document(batch: Batch, arm: Arm, output: torch.Tensor) -> list[torch.Tensor]:
    """Return what an output (rows, columns, ...) of an arm says of each document."""
    if is_packed(arm):
        return list(output[0].split(batch.lengths))
    return [row[:length] for row, length in zip(output, batch.lengths, strict=True)]


def backend_of(arm: Arm) -> str:
    """Return the backend that an enabled arm asks for: by name the one that `auto` takes on a GPU,
    so that it is it."""
    if arm.implementation is not None:
        return "flash"
    return "varlen" if choose.availability()["varlen"][0] else "auto"


@contextlib.contextmanager
def on(model: Any, arm: Arm, proven: bool = False) -> Iterator[autopack.Handle | None]:
    """Put a model into the state of an arm, and take autopack off again; yield its handle where it
    is on.

    Common beginnings of documents run once only in a `proven` model.
    """
    set_implementation(model, arm.implementation or "sdpa")
    if not arm.enabled:
        with (
            by_hand.registered() if arm.implementation == by_hand.NAME else contextlib.nullcontext()
        ):
            yield None
        return
    # Not verified: an audit at every change of arms would take the time, and these arms are
    # compared anyway.
    with autopack.enable(model, backend=backend_of(arm), verify=proven, check_every=0) as handle:
        if proven and model.device.type == "cpu":
            taken_for_kernels(handle)
        yield handle
