"""Read how a call declares its documents, in any form that collators use, and check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL, prepared, ways
from autopack.layout.host import host_values, on_host, recall
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import Of, changes

_SECTIONS = "position_ids of three sections"
_PREPARED = "a prepared attention_mask"
_TOKENS = "input_ids"


@dataclass(frozen=True)
class Declared:
    """Documents, padding and positions that one call declares; `layout` is None if it packs none.

    `real` is True at tokens other than padding, (rows, columns) on the host; None if all are
    tokens. `positions` are the position ids of the call, of the same shape, if it gives any of one
    section. `labelled_padding` is True if labels count padding into the loss.
    `labelled_after_padding` is True if a token after padding has a label, which a loss that shifts
    compares with a prediction made at padding. `jumps` is True if positions of a row neither go on
    nor begin anew, so that their meaning is unknown. `tokens` are the input_ids (rows, columns), if
    they were copied to the host along with the others. `beside_ones` is True if positions alone
    declare documents, beside a mask of ones, which for stock means one document per row.
    """

    layout: PackedLayout | None
    real: np.ndarray | None = None
    positions: np.ndarray | None = None
    labelled_padding: bool = False
    labelled_after_padding: bool = False
    jumps: bool = False
    beside_ones: bool = False
    tokens: np.ndarray | None = None

    def real_of(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return `real` for a batch of this shape: True everywhere if all are tokens."""
        return np.ones(shape, dtype=bool) if self.real is None else self.real


def read(
    arguments: Mapping[str, Any],
    shape: tuple[int, int],
    device: torch.device,
    first_position: int = 0,
    ignored_label: int = IGNORED_LABEL,
    continues: bool = False,
    known: Mapping[str, Tensor] | None = None,
    any_positions: bool = False,
    with_tokens: bool = False,
) -> Declared:
    """Return the documents that a forward's arguments declare; raise if malformed or at odds.

    It reads:

    * `position_ids` (rows, columns), (1, columns), or (3 or 4, rows, columns) for M-RoPE, where a
      document starts with 0 in every section. They declare documents if some token after the first
      of its row has 0 or `first_position`.
    * `attention_mask` (rows, columns) with 0, 1 or segment ids; of a prepared mask (rows, 1,
      columns, columns), the tokens that see themselves.
    * `cu_seq_lens_q/k` over the flattened rows with `max_length_q/k`, which may end before the last
      padding.
    * `seq_idx` (rows, columns).

    Labels of `ignored_label` count in no loss. A call that `continues` a cache counts on from
    there, after padding too, and its mask may cover the cache. With `any_positions`, positions that
    neither go on nor begin anew in some document of another declaration declare nothing: they are
    used as given. `with_tokens` copies input_ids along if something is copied from a device.

    This costs at most one copy from the device to the host, and none if nothing is declared, or if
    all is remembered from before it was moved (`HostBatch`) or given as `known`, arguments on the
    CPU by name. Raises `InvalidPacking` if a declaration is malformed or two of them disagree.
    """
    host_side = recall(arguments) if known is None else known
    tensors = dict(_declaring_tensors(arguments, host_side, shape, device, continues))
    if not tensors:
        return Declared(None)
    ids = host_side.get(_TOKENS, arguments.get(_TOKENS))
    on_device = with_tokens and device.type != "cpu"
    if on_device and isinstance(ids, Tensor) and ids.shape == shape:
        copies = any(tensor.device.type != "cpu" for tensor in tensors.values())
        if copies or _TOKENS in host_side:
            tensors[_TOKENS] = ids
    # All of a device in one transfer, so that a forward costs at most one device sync.
    host = {name: host_values(tensor.long()) for name, tensor in on_host(tensors).items()}
    tokens, positions = host.pop(_TOKENS, None), host.get("position_ids")
    mask = host.get("attention_mask", host.get(_PREPARED, np.ones(shape)))
    real = mask != 0
    if (mask < 0).any():
        raise _invalid(
            "attention_mask must hold 0 and 1, or segment ids with 0 for padding; found negative "
            "or fractional values. An additive mask must be four-dimensional, and cannot be "
            "combined with packed rows."
        )
    declarations = dict(_declared_starts(host, real))
    # The first real token of a row starts a document whether it is said or not.
    first = real & (np.cumsum(real, axis=1) == 1)
    later = real & ~first
    jumps, kept = False, None
    if positions is not None:
        own = declarations.pop("position_ids")
        others = next(iter(declarations.values()), None)
        # Positions that do not go on by one declare documents only if they begin anew somewhere:
        # generation counts on after padding, and scripts that stretch positions leave gaps.
        of_row = np.where(first, positions, 0).sum(axis=1, keepdims=True)
        anew = (positions == 0) | (positions == first_position)
        anew |= (positions == of_row) & (not continues)
        if any_positions and others is not None and not continues:
            kept = others if (own & later & ~others & ~anew).any() else None
        jumps = (own & later).any() and not anew[own & later].any()
        if kept is None and not jumps:
            declarations = {"position_ids": own, **declarations}
        jumps = bool(jumps and kept is None and not continues)
    if _SECTIONS in host:
        declarations[_SECTIONS] = _section_starts(host[_SECTIONS], real, later, declarations)
    _check_agreement(declarations, later)
    # Packed means that some row holds a second document; whatever else is declared, the call is an
    # ordinary one.
    packing = [each for each in declarations.values() if (each & later).any()]
    starts = packing[0] if packing else kept
    if starts is None:
        if real.all() or _PREPARED in host:
            return Declared(None, positions=positions, jumps=jumps, tokens=tokens)
        counted = host.get("labels", np.full(shape, ignored_label)) != ignored_label
        # which stand a column before their tokens, and are used in place of labels
        if "shift_labels" in host:
            counted = np.pad(host["shift_labels"][:, :-1] != ignored_label, ((0, 0), (1, 0)))
        labelled = bool(counted[~real].any())
        after = bool((counted[:, 1:] & real[:, 1:] & ~real[:, :-1]).any())
        return Declared(None, real, positions, labelled, after, jumps, tokens=tokens)
    bounds = [host[name].size for name in host if name.startswith("cu_seq_lens_")]
    slots = max(bounds, default=0)
    starts = _with_padding(starts, real, later)
    layout = PackedLayout.from_starts(starts, device, positions, real, slots)
    alone = "attention_mask" in host and declarations.keys() == {"position_ids"}
    ones = alone and bool((mask == 1).all())
    found = None if real.all() else real
    return Declared(layout, found, positions, beside_ones=ones, tokens=tokens)


def _declaring_tensors(
    arguments: Mapping[str, Any],
    known: Mapping[str, Tensor],
    shape: tuple[int, int],
    device: torch.device,
    continues: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of declaring arguments, and labels beside a mask; raise if malformed."""
    rows, columns = shape
    given = {**arguments, **known}
    position_ids = given.get("position_ids")
    if position_ids is not None:
        # Times of three sections may be fractions (Qwen3-Omni).
        sections = isinstance(position_ids, Tensor) and position_ids.dim() == 3 == len(position_ids)
        _check_tensor("position_ids", arguments["position_ids"], device, any_numbers=sections)
        if (
            position_ids.dim() == 3
            and len(position_ids) in (3, 4)
            and position_ids.shape[1:] == shape
        ):
            # M-RoPE. With four sections the first holds text positions.
            yield (
                (_SECTIONS, _code_sections(position_ids))
                if sections
                else ("position_ids", position_ids[0])
            )
        elif position_ids.shape in (shape, (1, columns)):
            yield "position_ids", position_ids.expand(shape)
        else:
            raise _invalid(
                f"position_ids must have the shape of the batch, ({rows}, {columns}), or (1, "
                f"{columns}), or (3 or 4, {rows}, {columns}) for M-RoPE; found "
                f"{tuple(position_ids.shape)}"
            )
    mask = given.get("attention_mask")
    if continues and isinstance(mask, Tensor) and mask.dim() == 2:
        mask = mask[:, -columns:]
    # Dicts of masks and BlockMask are prepared by the caller: the entry deals with them.
    if isinstance(mask, Tensor) and prepared.is_readable(mask, shape):
        _check_tensor("attention_mask", arguments["attention_mask"], device, any_numbers=True)
        yield _PREPARED, prepared.sees_itself(mask).expand(shape)
    elif isinstance(mask, Tensor) and mask.shape == shape:
        _check_tensor("attention_mask", arguments["attention_mask"], device, any_numbers=True)
        if mask.is_floating_point():  # what is no whole number must not become one unseen
            mask = mask.where((mask == mask.round()) & mask.isfinite(), -1)
        yield "attention_mask", mask
        for name in ("labels", "shift_labels"):
            labels = given.get(name)
            if isinstance(labels, Tensor) and labels.shape == shape:
                yield name, labels
    for way in ways.TABLE:
        value = given.get(way.name)
        if value is None or not (way.starts or way.per is Of.BOUND):
            continue
        of_tokens = way.per is Of.TOKEN
        _check_tensor(way.name, arguments[way.name], device if of_tokens else None)
        wanted = f"({rows}, {columns})" if of_tokens else "(documents + 1,), documents >= 1"
        if not (value.shape == shape if of_tokens else value.dim() == 1 and len(value) > 1):
            raise _invalid(f"{way.name} must have the shape {wanted}; found {tuple(value.shape)}")
        yield way.name, value


def _check_tensor(
    name: str, value: Any, device: torch.device | None, any_numbers: bool = False
) -> None:
    """Raise `InvalidPacking` unless a value is an integer tensor, on `device` if that is given."""
    if not isinstance(value, Tensor):
        raise _invalid(f"{name} must be an integer tensor; found {type(value).__name__}")
    is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if not (is_integer or any_numbers):
        raise _invalid(f"{name} must be an integer tensor; found dtype {value.dtype}")
    if device is not None and value.device != device:
        raise _invalid(
            f"{name} must lie on the device of the inputs, {device}; found {value.device}. Use "
            f"`.to({device})`"
        )


def _declared_starts(
    host: dict[str, np.ndarray], real: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (argument, mask (rows, columns) of documents' first tokens); raise if malformed."""
    if "position_ids" in host:
        values, starts = host["position_ids"][real], np.zeros_like(real)
        if (values < 0).any():
            raise _invalid(f"position_ids must not be negative; found {int(values.min())}")
        # Those whose position does not go on by one.
        starts[real] = ~_counts_on(values, real)
        yield "position_ids", starts
    mask = host.get("attention_mask")
    if mask is not None and mask.max(initial=0) > 1:
        yield "attention_mask (segment ids)", _segment_starts(mask)
    for way in ways.TABLE:
        if way.name in host and (way.starts or way.per is Of.BOUND):
            values = host[way.name]
            yield (
                way.name,
                way.starts(values) if way.starts else _cumulative_starts(way.name, values, real),
            )


def _check_agreement(declarations: dict[str, np.ndarray], later: np.ndarray) -> None:
    """Raise `InvalidPacking` if two arguments declare different starts at the tokens `later`."""
    for one, other in pairwise(declarations):
        differs = (declarations[one] != declarations[other]) & later
        if differs.any():
            row, column = np.argwhere(differs)[0]
            starting, silent = (one, other) if declarations[one][row, column] else (other, one)
            raise InvalidPacking(
                f"two declarations disagree: by {starting} a document starts at row {row}, column "
                f"{column}, by {silent} none does. Pass one of them, or make them agree.",
                code="documents-unclear",
            )


def _with_padding(starts: np.ndarray, real: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Return `starts` with every run of padding a document; raise for padding inside a document."""
    edges = np.diff(real, axis=1, prepend=~real[:, :1])
    resumed = edges & later & ~starts
    if resumed.any():
        row, column = np.argwhere(resumed)[0]
        raise _invalid(
            f"padding lies inside a document: at row {row}, column {column} a document goes on "
            "after masked tokens. Between packed documents padding is fine, inside one it is not; "
            "remove the masked tokens."
        )
    return (starts & real) | edges


def _code_sections(positions: Tensor) -> Tensor:
    """Return M-RoPE positions as int64 (rows, columns): 2 * time, +1 off text, -1 if wrong.

    It is twice the time position, plus one if the sections differ, as in images, or are no whole
    numbers, as in videos; -1 if one is negative.
    """
    time = positions[0].long()
    is_text = ((positions == positions[:1]) & (positions == positions.floor())).all(0)
    return (2 * time + ~is_text).where((positions.isfinite() & (positions >= 0)).all(0), -1)


def _invalid(message: str) -> InvalidPacking:
    """Return the `InvalidPacking` for a malformed declaration."""
    return InvalidPacking(message, code="declaration-invalid")


def _counts_on(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return a mask (tokens,), True where a position goes on by one, or over padding as columns do.

    `values` are the positions of the tokens that `real` (rows, columns) marks, row by row. Across a
    run of padding a document may go on with the next position or with the next column's.
    """
    columns = np.nonzero(real)[1]
    step = np.diff(values, prepend=values[:1])
    return (step == 1) | (step == np.diff(columns, prepend=columns[:1]))


def _section_starts(
    sections: np.ndarray, real: np.ndarray, later: np.ndarray, declared: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return a mask (rows, columns), True where three sections begin documents; raise if unclear.

    In a document, time goes on and text counts on by one. Anything else could be a document that
    starts at a later position, or a video with its sound numbered beside it; only another
    declaration can tell. The same holds for two tokens at 0 before an image: a document of one
    token, or the token that opens an image (MiniCPM-V 4.7).
    """
    if (sections[real] < 0).any():
        raise _invalid("position_ids must not be negative; found such in one of three sections")
    zero = (sections == 0) & real
    opened = np.zeros_like(zero)
    opened[:, 1:-1] = zero[:, :-2] & zero[:, 1:-1] & (sections[:, 2:] == 1)
    elsewhere = next(iter(declared.values()), None)
    if elsewhere is not None:
        return (zero & ~opened) | elsewhere
    times, text = sections[real] >> 1, (sections[real] & 1) == 0
    goes_on = _counts_on(times, real) | ~(text & np.append(text[:1], text[:-1]))
    back = np.diff(times, prepend=times[:1]) < 0
    unclear = later[real] & ((~zero[real] & (back | ~goes_on)) | opened[real])
    if unclear.any():
        row, column = np.argwhere(real)[unclear][0]
        raise InvalidPacking(
            "position_ids of shape (3, rows, columns) neither go on nor begin at 0 in all sections "
            f"at row {row}, column {column}, so autopack cannot tell whether a document starts "
            "there. Declare the documents by seq_idx too (one number for one document), or by "
            "segment ids in attention_mask.",
            code="documents-unclear",
        )
    return zero


def _segment_starts(mask: np.ndarray) -> np.ndarray:
    """Return a mask (rows, columns), True where an id or padding begins; raise if one is back."""
    starts = changes(mask)
    rows, columns = np.nonzero(starts & (mask > 0))
    runs, counts = np.unique(np.stack([rows, mask[rows, columns]]), axis=1, return_counts=True)
    if (counts > 1).any():
        row, number = runs[:, counts > 1][:, 0]
        raise _invalid(
            "attention_mask holds segment ids, and each id must be one unbroken run of a row; in "
            f"row {row} id {number} comes back after another. Number the documents of a row 1, 2, "
            "3, ..."
        )
    return starts


def _cumulative_starts(name: str, bounds: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return a mask, True where `bounds` begin documents and at all behind the last; or raise."""
    columns, last = real.shape[1], int(bounds[-1])
    # Some collators repeat the end; an empty document is none. Others end before padding that the
    # mask marks.
    if (
        bounds[0] != 0
        or last > real.size
        or (np.diff(bounds) < 0).any()
        or real.reshape(-1)[last:].any()
    ):
        raise _invalid(
            f"{name} must rise from 0 to the {real.size} tokens of the flattened rows; found "
            f"{bounds.tolist()[:8]}{'...' if len(bounds) > 8 else ''} ending at {last}. It may end "
            "before the last padding, where attention_mask says that it is such."
        )
    starts = np.zeros(real.size + 1, dtype=bool)
    starts[last:] = True
    starts[bounds] = True
    grid = starts[:-1].reshape(real.shape)
    if not grid[:, 0].all():
        row = int(np.flatnonzero(~grid[:, 0])[0])
        raise _invalid(
            f"{name} counts over the flattened rows and must have a bound at the start of every "
            f"row; none at token {row * columns}, where row {row} begins: a document cannot span "
            "two rows"
        )
    return grid
