"""A whole padded batch of a live call: what every real token of it got, against what stock makes of the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.auditing.fields import Fields
from autopack.calls.call import Call
from autopack.calls.encoder_decoder.pairs import PairCall
from autopack.layout.forms import Frame, Of, rows_first
from autopack.watching.document import CannotTell


class PaddedBatch:
    """The batch as it came, and where its tokens are real: (rows, columns), of a pair for both halves."""

    def __init__(self, arguments: dict[str, Any], sides: list[np.ndarray]):
        self.arguments, self._sides = arguments, sides

    @classmethod
    def of(cls, call: Call) -> PaddedBatch:
        """The padded batch of a call. Raises `CannotTell` where nothing says what of it is padding."""
        if isinstance(call, PairCall):
            return cls(call.arguments, [half.places.real for half in call.pair.halves[::-1]])
        if call.declared.real is None:
            raise CannotTell("its documents are declared further in")
        return cls(call.arguments, [call.declared.real])

    def split(self, outputs: Fields, alone: Fields) -> dict[str, tuple[torch.Tensor, ...]]:
        """What the real tokens got and what stock gives them, (tokens, ...), of every field; else (rows, ...)."""
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, wanted in alone.items():
            got = outputs.get(name)
            if got is not None and got.shape == wanted.shape:
                found[name] = (self._real(name, got), self._real(name, wanted))
        return found

    def _real(self, name: str, value: torch.Tensor) -> torch.Tensor:
        # An encoder and its decoder may have batches of one shape.
        sides = self._sides[::-1] if name.startswith("encoder") else self._sides
        for real in sides:
            form = Frame(*real.shape).form_of_output(name.partition("[")[0], value)
            if form.of is Of.TOKEN:
                where = torch.from_numpy(np.ascontiguousarray(real)).to(value.device)
                return value[where.reshape(-1)] if form.columns == 0 else rows_first(value, form.columns)[where]
        return value

    def place_of(self, errors: torch.Tensor) -> tuple[int, int, tuple[int, int]]:
        """The row with the largest error, which is its document's number too, and its first and end column."""
        real = self._sides[0]
        row = int(np.nonzero(real)[0][int(errors.argmax())]) if len(errors) == int(real.sum()) else 0
        columns = np.flatnonzero(real[row])
        return row, row, (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, real.shape[1])
