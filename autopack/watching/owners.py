"""The document that each token of a call belongs to."""

from __future__ import annotations

import numpy as np
import torch

from autopack.auditing.fields import Side, Sides
from autopack.calls.call import LAST_LOGITS, Call
from autopack.calls.encoder_decoder import PairCall
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout, real_documents
from autopack.layout.pair import Half


class CannotTell(Exception):
    """Raised if a call, or a part of it, cannot be checked; the message says why."""


def sides_of(call: Call) -> Sides:
    """Return the places of the documents of a call. Raises `CannotTell`."""
    if call.brings_choices:
        raise CannotTell("its rows are choices of questions")
    layout = call.one_sided_layout() if isinstance(call, PairCall) else call.declared.layout
    if call.part is not None:
        sides = [Side(_owner_of(call.part[0])[:, call.part[1]])]
    elif layout is not None:
        sides = [Side(_owner_of(layout))]
    elif isinstance(call, PairCall):
        decoder = call.pair.decoder
        sides = [Side(_owner_in(half), "decoder_" if half is decoder else "") for half in call.pair.halves[::-1]]
    elif call.declared.real is not None:
        real = call.declared.real
        sides = [Side(np.where(real, np.arange(len(real))[:, None], -1))]
    else:
        raise CannotTell("its documents are declared further in")
    given = map(call.arguments.get, LAST_LOGITS)
    asked = next((v for v in given if isinstance(v, torch.Tensor) or (type(v) is int and v != 0)), None)
    if asked is not None:
        columns = host_values(asked).reshape(-1) if isinstance(asked, torch.Tensor) else slice(-asked, None)
        sides.append(Side(sides[0].owner[:, columns], sides[0].prefix))
    return Sides(sides)


def _owner_of(layout: PackedLayout) -> np.ndarray:
    real = real_documents(layout)
    numbers = np.where(real, np.cumsum(real) - 1, -1)
    return np.repeat(numbers, layout.sizes).reshape(layout.rows, layout.columns)


def _owner_in(half: Half) -> np.ndarray:
    owner = np.full(half.places.real.shape, -1)
    owner[half.places.real] = np.repeat(np.arange(len(half.layout.lengths)), half.layout.lengths)
    return owner
