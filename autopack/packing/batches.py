"""Cut batches into the documents in them, and join documents of several batches to one.

Shapes: R rows, C columns of a batch; n tokens of a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch

from autopack.errors import InvalidPacking
from autopack.inspection import media
from autopack.layout import IGNORED_LABEL, declarations
from autopack.layout.ways import LAYOUT_KWARGS

Batch = Mapping[str, Any]
Example = tuple[dict[str, Any], ...]
"""The columns of a document, (n, ...) where they are per token; of a pair, of both its rows."""
Place = tuple[int, int, int]
"""Row, first column and end of a document."""

_MASK = "attention_mask"


class Per(Enum):
    """Unit for which a batch's key holds values: each token, row, pair of rows, or the call."""

    TOKEN = auto()
    TARGET = auto()
    """Each token of the decoder of an encoder-decoder."""
    ROW = auto()
    EXAMPLE = auto()
    """Each pair of rows."""
    CALL = auto()


class Columns(NamedTuple):
    """Keys of the batches of a step, with the unit of each and its value at padding.

    `rows_each` is 2 where a batch holds pairs, all first rows before all second ones.
    """

    per: dict[str, Per]
    rows_each: int
    on_the_left: bool
    fill: dict[str, Any]


def cut(
    batches: Sequence[Batch], config: Any, rows_each: int = 1, first: int = 0
) -> tuple[Columns, list[list[Example]]]:
    """Return the `Columns` of batches, and the documents of each batch; raise if one cannot be cut.

    A batch is padded, with an `attention_mask` (R, C), or holds packed rows in any form that
    autopack reads; `first` is the position of a first token. The model's `config` tells the token
    of padding, and if it is an encoder-decoder, whose batches are cut on both sides.
    """
    if not batches:
        raise _not_cut("the step has no batch")
    parts, places, paddings = zip(*(_with_places(batch, first) for batch in batches), strict=True)
    shapes = [tokens_of(part).shape[:2] for part in parts]
    names = dict.fromkeys(name for part in parts for name in part)
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    per = {
        n: _unit_of(n, [part.get(n) for part in parts], shapes, rows_each, is_pair) for n in names
    }
    if rows_each > 1 and [*map(len, places)] != [rows for rows, _ in shapes]:
        raise _not_cut("its rows are pairs, and hold several documents each")
    padded = [each for each in zip(parts, places, paddings, strict=True) if each[2] is not None]
    fill = {"input_ids": getattr(config, "pad_token_id", None) or 0, "labels": IGNORED_LABEL}
    fill |= {n: part[n][at] for part, _, at in padded[:1] for n in names if per[n] is Per.TOKEN}
    on_the_left = any(start for _, lies, _ in padded for _, start, _ in lies)
    columns = Columns(per, rows_each, on_the_left, {**fill, _MASK: 0})
    return columns, [
        _examples(part, lies, columns) for part, lies in zip(parts, places, strict=True)
    ]


def join(examples: Sequence[Example], columns: Columns) -> dict[str, Any]:
    """Return a batch of documents that `cut` gave, padded on the side where their batches were."""
    rows = [example[number] for number in range(columns.rows_each) for example in examples]
    found: dict[str, Any] = {}
    for name, per in columns.per.items():
        values = [row[name] for row in (rows if per is not Per.EXAMPLE else rows[: len(examples)])]
        if per in (Per.TOKEN, Per.TARGET):
            found[name] = _padded(
                values, columns.fill.get(name, 0), columns.on_the_left and per is Per.TOKEN
            )
        elif per is Per.CALL:
            found[name] = values[0]
        else:
            found[name] = torch.stack(values) if isinstance(values[0], torch.Tensor) else values
    return found


def length_of(example: Example, columns: Columns) -> int:
    """Return a document's number of tokens, over all of its rows, encoder and decoder."""
    of_side = {per: name for name, per in columns.per.items() if per in (Per.TOKEN, Per.TARGET)}
    return sum(len(row[name]) for row in example for name in of_side.values())


def tokens_of(batch: Batch) -> torch.Tensor:
    """Return a batch's `input_ids` or `inputs_embeds`, (rows, columns, ...); raise without both."""
    given = (batch.get(name) for name in ("input_ids", "inputs_embeds"))
    tokens = next((value for value in given if value is not None), None)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        found = ", ".join(batch) or "nothing"
        raise _not_cut(
            f"it wants input_ids or inputs_embeds of shape (rows, columns, ...), and found {found}"
        )
    return tokens


def _with_places(batch: Batch, first: int) -> tuple[dict[str, Any], list[Place], Any]:
    """Return a batch with an `attention_mask`, its documents' places, and the first padding's.

    That one, row and column, is None without padding, and for packed rows. What only declares
    documents is left out of the batch.
    """
    if not isinstance(batch, Mapping):
        raise _not_cut(f"it is a {type(batch).__name__} and not a mapping from names to tensors")
    if media.given(batch):
        raise _not_cut(
            f"nothing says which of {', '.join(media.given(batch))} belongs to which row"
        )
    tokens = tokens_of(batch)
    shape = rows, columns = len(tokens), tokens.shape[1]
    given = {name: value for name, value in batch.items() if value is not None}
    declared = declarations.read(given, shape, tokens.device, first)
    layout, real = declared.layout, declared.real_of(shape)
    if layout is None:
        start = real.argmax(1)
        sizes = columns - real[:, ::-1].argmax(1) - start
        begins = np.arange(rows) * columns + start
        padding = next(zip(*np.nonzero(~real), strict=True), None)
    else:
        kept = slice(None) if layout.is_padding is None else ~layout.is_padding
        begins, sizes, padding = layout.bounds[:-1][kept], layout.sizes[kept], None
        real = np.ones(shape, bool)
    found = {name: value for name, value in given.items() if name not in LAYOUT_KWARGS}
    found[_MASK] = torch.from_numpy(real).to(tokens.device).long()
    row, start = np.divmod(begins, columns)
    return found, np.stack([row, start, start + sizes], 1).tolist(), padding


def _unit_of(
    name: str, values: list[Any], shapes: list[torch.Size], rows_each: int, is_pair: bool
) -> Per:
    """Return the unit of a key's values, one for each batch; raise `InvalidPacking` without one."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values):
        is_target = is_pair and (name == "labels" or name.startswith("decoder_"))
        if is_target and all(each.dim() > 1 for each in tensors):
            return Per.TARGET
        is_float = name == "labels" and tensors[0].is_floating_point()
        if [each.shape[:2] for each in tensors] == shapes and not is_float:
            return Per.TOKEN
    listed = [value for value in values if isinstance(value, list | tuple)]
    sizes = [*map(len, listed or (each for each in tensors if each.dim()))]
    for per, each in ((Per.ROW, 1), (Per.EXAMPLE, rows_each)):
        counts = [rows // each for rows, _ in shapes]
        if sizes == counts and len({each.shape[1:] for each in tensors}) < 2:
            return per
    if not tensors and all(value == values[0] for value in values):
        return Per.CALL
    raise _not_cut(f"nothing says what of {name} belongs to which row")


def _examples(batch: Batch, places: list[Place], columns: Columns) -> list[Example]:
    """Return the documents at these places of a batch, each as a dict for each of its rows."""
    ends, count, found = _ends_of_targets(batch, columns), len(places) // columns.rows_each, []
    for number, (row, start, stop) in enumerate(places):
        at: dict[Per, Any] = {
            Per.TOKEN: (row, slice(start, stop)),
            Per.TARGET: (row, slice(ends[row] if ends else None)),
            Per.ROW: row,
            Per.EXAMPLE: number % count,
        }
        found.append(
            {n: batch[n][at[per]] if per in at else batch[n] for n, per in columns.per.items()}
        )
    return [tuple(found[number::count]) for number in range(count)]


def _ends_of_targets(batch: Batch, columns: Columns) -> list[int]:
    """Return the number of decoder columns that each row uses; [] if all are, or there are none."""
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if Per.TARGET not in columns.per.values() or (mask is None and labels is None):
        return []
    real: Any = mask != 0 if mask is not None else labels != IGNORED_LABEL
    last = real.long() * torch.arange(1, real.shape[1] + 1, device=real.device)
    return last.amax(1).clamp(min=1).tolist()


def _padded(values: list[torch.Tensor], fill: Any, on_the_left: bool) -> torch.Tensor:
    """Return tensors (n, ...) as one of (rows, longest n, ...), padded with `fill`."""
    most = max(map(len, values))
    found = values[0].new_empty((len(values), most, *values[0].shape[1:]))
    found[:] = fill
    for row, value in zip(found, values, strict=True):
        row[most - len(value) if on_the_left else 0 :][: len(value)] = value
    return found


def _not_cut(why: str) -> InvalidPacking:
    """Return the error for a batch that cannot be cut into its documents."""
    return InvalidPacking(
        "max_tokens cuts the batches of a step into their documents, and cannot cut this one: "
        f"{why}. Leave out max_tokens, or have the collator return what each row needs in columns "
        "of one entry a row or a token.",
        code="batch-not-cut",
    )
