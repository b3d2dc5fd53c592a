"""Calls with images, videos or sounds: whether code that no run has measured with them keeps documents apart."""

from __future__ import annotations

import torch

from autopack.calls.call import Call
from autopack.calls.entry import Kind
from autopack.inspection import media


def why_media_meet(call: Call, kind: str) -> str | None:
    """Why documents of a call may not get what they get alone with its media of this kind; None where they do."""
    return call.model.why_media_meet(kind, _count(call))


def _count(call: Call) -> int:
    """How many images or the like a call has, as far as its arguments tell: as many as documents, or more."""
    values = (call.arguments[name] for name in media.given(call.arguments))
    counts = [len(value) for value in values if isinstance(value, torch.Tensor) and value.dim()]
    layout = None if call.entry.kind is Kind.PAIR else call.declared.layout
    return max(1, 0 if layout is None else len(layout.lengths), min(counts, default=0))
