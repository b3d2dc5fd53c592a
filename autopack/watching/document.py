"""What of a live call is compared: one document, with its arguments by itself, or a whole padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopack.auditing.cases import tokens_named
from autopack.auditing.fields import Fields
from autopack.calls.call import DROPPED, LAST_LOGITS, Call
from autopack.calls.encoder_decoder import DECLARED, PairCall, half_of
from autopack.calls.packed import without_what_packing_drops
from autopack.calls.row_heads import DocumentArguments
from autopack.inspection import media
from autopack.layout.batches import DocumentBatch
from autopack.layout.forms import Frame, Of, columns_of, holds_tensors, rows_first
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.pair import Half
from autopack.layout.ways import LAYOUT_KWARGS

_NOT_ALONE = {*DROPPED, *LAYOUT_KWARGS, *LAST_LOGITS}
_MEDIA_TOKENS = ("image", "video", "audio", "vision", "sound", "protein")


class CannotTell(Exception):
    """Why no document of a call can be run by itself."""


@dataclass(frozen=True)
class Side:
    """Where the tokens of a document lie: in the batch of the caller, in the row it became, and in the run alone."""

    shape: tuple[int, int]
    """Rows and columns of the batch."""
    row: int
    columns: np.ndarray
    """Columns of the batch that hold its tokens, in order."""
    inside: np.ndarray
    """Columns that hold them in the run alone."""
    width: int
    """Columns of the run alone."""
    first: int = 0
    """Its first token in the one row that the batch became."""
    tokens: int = -1
    """Tokens of that row; -1 where the rows of the batch are run as they are."""

    def parts(self, value: torch.Tensor, alone: torch.Tensor, document: Document) -> tuple[torch.Tensor, ...] | None:
        """What the document got of a field, and what it gets alone, (tokens, ...); None where it is not per token."""
        # A field of shifted labels has a column fewer than there are tokens (TRL's `log_probs`).
        for fewer in (0, 1) if self.width > 1 else (0,):
            axis = columns_of([alone], [(1, self.width - fewer)])
            if axis is None or value.dim() != alone.dim():
                continue
            found = self._of(rows_first(value, axis), document, fewer)
            if found is not None and len(found):
                return found, rows_first(alone, axis)[0][self._index(self.inside[: len(found)], alone)]
        if len(alone) == self.width and value.dim() == alone.dim():
            for rows, columns in (self.shape, (1, self.tokens)):
                if len(value) == rows * columns:
                    found = self._of(value.reshape(rows, columns, *value.shape[1:]), document)
                    return None if found is None else (found, alone[self._index(self.inside, alone)])
        return None

    def _of(self, value: torch.Tensor, document: Document, fewer: int = 0) -> torch.Tensor | None:
        """What the document has of a field whose rows have `fewer` columns than tokens."""
        rows, columns = value.shape[0], value.shape[1] + fewer
        length = len(self.columns) - fewer
        if (rows, columns) == self.shape:
            return value[self.row][self._index(self.columns[:length], value)]
        if (rows, columns) == (1, self.tokens):
            return value[0, self.first : self.first + length]
        return value[document.number, :length] if (rows, columns) == (document.count, document.longest) else None

    @staticmethod
    def _index(columns: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(columns).to(like.device)


@dataclass(frozen=True)
class Document:
    """One document of a call."""

    arguments: dict[str, Any]
    """Those of a call with nothing else in it."""
    sides: tuple[Side, ...]
    """That of the decoder first, of an encoder-decoder."""
    number: int
    """Which of the `count` documents of the call it is: of the results of a head with one result per document, too."""
    count: int
    longest: int = -1
    """Tokens of the longest document, by which such a head may have padded the others."""

    def place_of(self, errors: torch.Tensor) -> tuple[int, int, tuple[int, int]]:
        """Its number in the call, its row, and its first and end column, whichever token differs the most."""
        side = self.sides[0]
        return self.number, side.row, (int(side.columns[0]), int(side.columns[-1]) + 1)

    def split(self, outputs: Fields, alone: Fields) -> dict[str, tuple[torch.Tensor, ...]]:
        """What it got and what it gets alone, (tokens or 1, ...), of every field of which that can be told."""
        found = {}
        for name, wanted in alone.items():
            value = outputs.get(name)
            parts = None if value is None or not (value.dim() and wanted.dim()) else self._parts(value, wanted)
            if parts is not None and parts[0].shape == parts[1].shape:
                found[name] = parts
        return found

    def _parts(self, value: torch.Tensor, alone: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        for side in self.sides:
            parts = side.parts(value, alone, self)
            if parts is not None:
                return parts
        if len(alone) == 1 and len(value) == self.count and value.shape[1:] == alone.shape[1:]:
            return value[self.number][None], alone
        return None


def document_of(call: Call, turn: int) -> Document:
    """A document of a call that packs or pads; the next one in each `turn`. Raises `CannotTell`."""
    if call.brings_choices:
        raise CannotTell("its rows are choices of questions")
    if isinstance(call, PairCall):
        layout = call.one_sided_layout()
        if layout is None:
            return _of_pair(call, turn)
    else:
        layout = call.declared.layout
    if layout is not None:
        return _of_packed(call, layout, turn)
    if call.declared.real is None:
        raise CannotTell("its documents are declared further in")
    return _of_padded(call, turn)


def _of_packed(call: Call, layout: PackedLayout, turn: int) -> Document:
    whole = DocumentBatch.without_padding(layout)
    chosen = _without_media(call, [layout.spans[number] for number in whole.documents], turn)
    number = int(whole.documents[chosen])
    row, first, end = layout.spans[number]
    if call.entry.head is not None:
        given = DocumentArguments(call.entry.head, without_what_packing_drops(call, call.arguments), layout)
        batch = DocumentBatch.of(layout, whole.documents[chosen : chosen + 1])
        arguments = given.map(lambda _, value: batch.spread(value), lambda value: value[chosen : chosen + 1])
    else:
        frame = _of_batch(layout.rows, layout.columns)
        arguments = _cut(call, lambda name, value: _of_columns(name, value, frame, row, np.arange(first, end)))
    started = 0 if layout.first_positions is None else int(layout.first_positions[number])
    known = layout.first_positions is None or started == call.entry.first_position
    counted = layout.largest_positions is None
    if (known and counted) or not call.entry.uses_positions:
        arguments.pop("position_ids", None)
    elif not counted:  # without a mask stock would take what does not count on for other documents
        arguments["attention_mask"] = layout.cu_seqlens.new_ones((1, end - first)).long()
    columns = np.arange(first, end)
    side = Side((layout.rows, layout.columns), row, columns, np.arange(end - first), end - first)
    return Document(arguments, (side,), chosen, len(whole.documents), whole.shape[1])


def _of_padded(call: Call, turn: int) -> Document:
    padding, traits = call.padding, call.model.traits
    spans = [(row, 0, padding.columns) for row in range(padding.rows)]
    row = _without_media(call, spans, turn)
    columns = np.flatnonzero(padding.real[row])
    # Elsewhere, or with frequencies of the longest row, what stock gives depends on the padding.
    strips = padding.on_the_right and not call.model.anatomy.has_row_dependent_rotary
    if not strips and (traits.recurs or traits.reads_padding or traits.counts_columns):
        raise CannotTell("what it gets alone depends on where padding stands")
    kept = columns if strips else np.arange(padding.columns)
    frame = _of_batch(*padding.shape)
    arguments = _cut(call, lambda name, value: _of_columns(name, value, frame, row, kept))
    if not strips:
        arguments["attention_mask"] = call.arguments["attention_mask"][row : row + 1]
    before = int(padding.real[:row].sum())
    inside = np.arange(len(columns)) if strips else columns
    side = Side(padding.shape, row, columns, inside, len(kept), before, padding.tokens)
    return Document(arguments, (side,), row, padding.rows)


def _of_pair(call: PairCall, turn: int) -> Document:
    halves = call.pair.halves
    count = len(call.pair.decoder.layout.lengths)
    number = turn % count
    sides = tuple(_side_of_half(half, number) for half in halves[::-1])

    def cut(name: str, value: torch.Tensor) -> torch.Tensor | None:
        half = half_of(name, call.pair)
        if half is None:
            return value[number : number + 1] if value.dim() and len(value) == count else None
        side = sides[0] if half is call.pair.decoder else sides[-1]
        return _of_columns(name, value, Frame(*side.shape), side.row, side.columns)

    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        positions = name.endswith("position_ids") and call.model.traits.uses_positions and name in call.entry.names
        if name == "attention_mask" and media.given(call.arguments) and value is not None and len(value) == count:
            arguments[name] = value[number : number + 1]  # of the patches or frames of each document
            continue
        if name in DECLARED and not positions:
            continue
        if name == "encoder_outputs" and value is not None:
            value = value[0]
            arguments[name] = (_kept_or_cut(name, value, cut),)
        else:
            arguments[name] = _kept_or_cut(name, value, cut)
    return Document(arguments, sides, number, count)


def _side_of_half(half: Half, number: int) -> Side:
    first, end = (int(bound) for bound in half.layout.bounds[number : number + 2])
    rows, columns = np.divmod(np.flatnonzero(half.places.real)[first:end], half.places.columns)
    length = end - first
    return Side(half.places.shape, int(rows[0]), columns, np.arange(length), length, first, half.places.tokens)


Cut = Callable[[str, torch.Tensor], "torch.Tensor | None"]


def _cut(call: Call, cut: Cut) -> dict[str, Any]:
    """The arguments with every tensor cut to the document, without what only batches have, and without media."""
    brought = {*media.given(call.arguments), *_NOT_ALONE}
    return {name: _kept_or_cut(name, value, cut) for name, value in call.arguments.items() if name not in brought}


def _kept_or_cut(name: str, value: Any, cut: Cut) -> Any:
    if not isinstance(value, torch.Tensor):
        if holds_tensors(value):
            raise CannotTell(f"what of {name} belongs to which document is not known")
        return value
    found = cut(name, value)
    if found is None and value.numel() != 1:
        raise CannotTell(f"what of {name} belongs to which document is not known")
    return value if found is None else found


def _of_batch(rows: int, columns: int) -> Frame:
    """The frame of a batch of which every row may bring something of its own."""
    return Frame(rows, columns, documents=rows, shared=True)


def _of_columns(name: str, value: torch.Tensor, frame: Frame, row: int, columns: np.ndarray) -> torch.Tensor | None:
    """Some columns of one row of an argument that has something for each token, or what it has for the row, or None."""
    form = frame.form_of(name, value)
    if form.of is Of.TOKEN:
        axis = form.columns
        place = row if value.shape[axis - 1] == frame.rows else 0
        return value.narrow(axis - 1, place, 1).index_select(axis, torch.from_numpy(columns).to(value.device))
    return value[row : row + 1] if form.of is Of.DOCUMENT and value.numel() > 1 else None


def _without_media(call: Call, spans: list[tuple[int, int, int]], turn: int) -> int:
    """The number of the document whose turn it is, among those without placeholders of media if the call has media."""
    if not media.given(call.arguments):
        return turn % len(spans)
    placeholders = sorted(tokens_named(call.module.config, ("_id", "token_index"), _MEDIA_TOKENS))
    ids = call.arguments.get("input_ids")
    if not placeholders or not isinstance(ids, torch.Tensor):
        raise CannotTell("which documents have images or other media is not known")
    tokens = np.isin(host_values(ids), placeholders)
    plain = [number for number, (row, first, end) in enumerate(spans) if not tokens[row, first:end].any()]
    if not plain:
        raise CannotTell("every document has images or other media")
    return plain[turn % len(plain)]


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
        return cls(_without_labels_behind_padding(call), [call.declared.real, *_kept(call)])

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


def _without_labels_behind_padding(call: Call) -> dict[str, Any]:
    """The arguments without labels that stock compares with what padding predicts, where the call leaves these out."""
    found = dict(call.arguments)
    if call.entry.shifts_labels and call.declared.labelled_after_padding:
        real = torch.from_numpy(call.padding.real)
        behind = torch.nn.functional.pad(~real[:, :-1], (1, 0)) & real
        for name, hidden in (("labels", behind), ("shift_labels", ~real)):
            if isinstance(labels := found.get(name), torch.Tensor):
                found[name] = labels.masked_fill(hidden.to(labels.device), call.ignored_label)
    return found


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
