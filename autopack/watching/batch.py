"""A whole padded batch of a live call: what every real token of it got, against what stock makes of the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.auditing.fields import Fields
from autopack.calls.call import LAST_LOGITS, Call
from autopack.calls.encoder_decoder.pairs import PairCall
from autopack.layout.forms import Frame, Of, rows_first
from autopack.layout.host import host_values
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
        return cls(call.arguments, [call.declared.real, *_kept(call)])

    def split(self, outputs: Fields, alone: Fields) -> dict[str, tuple[torch.Tensor, ...]]:
        """What the real tokens got and what stock gives them, (tokens, ...), of every field; else (rows, ...)."""
        pairs = {name: self._parts(name, outputs[name], wanted) for name, wanted in alone.items() if name in outputs}
        return {name: parts for name, parts in pairs.items() if parts is not None and parts[0].shape == parts[1].shape}

    def _parts(self, name: str, got: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        if not (got.dim() and wanted.dim()):
            return got.reshape(1), wanted.reshape(1)
        # An encoder and its decoder may have batches of one shape.
        sides = self._sides[::-1] if name.startswith("encoder") else self._sides
        for real in sides:
            expected = _real(name, wanted, real)
            if expected is not None:
                found = _real(name, got, real)
                # What nobody has read yet is the row that the batch has become.
                row = np.ones((1, int(real.sum())), dtype=bool)
                found = _real(name, got, row) if found is None else found
                return None if found is None else (found, expected)
        return got, wanted

    def place_of(self, errors: torch.Tensor) -> tuple[int, int, tuple[int, int]]:
        """The row with the largest error, which is its document's number too, and its first and end column."""
        real = self._sides[0]
        row = int(np.nonzero(real)[0][int(errors.argmax())]) if len(errors) == int(real.sum()) else 0
        columns = np.flatnonzero(real[row])
        return row, row, (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, real.shape[1])


def _kept(call: Call) -> list[np.ndarray]:
    """Where the tokens are real of which the caller asked for logits, if it asked for those of some columns only."""
    real, asked = call.declared.real, next(filter(_is_some, map(call.arguments.get, LAST_LOGITS)), None)
    if real is None or asked is None:
        return []
    return [real[:, host_values(asked).reshape(-1)] if isinstance(asked, torch.Tensor) else real[:, -asked:]]


def _is_some(asked: Any) -> bool:
    return isinstance(asked, torch.Tensor) or (type(asked) is int and asked != 0)


def _real(name: str, value: torch.Tensor, real: np.ndarray) -> torch.Tensor | None:
    """What of a field belongs to real tokens, (tokens, ...); None where it has nothing for each of them."""
    form = Frame(*real.shape).form_of_output(name.partition("[")[0], value)
    if form.of is not Of.TOKEN:
        return None
    where = torch.from_numpy(np.ascontiguousarray(real)).to(value.device)
    return value[where.reshape(-1)] if form.columns == 0 else rows_first(value, form.columns)[where]
