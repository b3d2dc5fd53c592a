"""Read how a call declares its documents, in any form that collators use, and check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL, prepared, ways
from autopack.layout.host import host_values, on_host, recall
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import (
    cumulative_starts,
    in_one,
    section_starts,
    segment_starts,
)

_SECTIONS = "position_ids of three sections"
_PREPARED = "a prepared attention_mask"
_TOKENS = "input_ids"
_READ_BY_STARTS = {way.name: way.starts for way in ways.TABLE if way.starts is not None}


@dataclass(frozen=True)
class Declared:
    """Declarations of one call: `layout` is None for a call that packs nothing.

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
    known: Mapping[str, torch.Tensor] | None = None,
    any_positions: bool = False,
    with_tokens: bool = False,
) -> Declared:
    """Return the documents that the arguments of a forward declare for a batch of `shape` (rows,
    columns).

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
    tensors = dict(_tensors(arguments, host_side, shape, device, continues))
    if not tensors:
        return Declared(None)
    ids = arguments.get("input_ids")
    if with_tokens and isinstance(ids, torch.Tensor) and ids.shape == shape and device.type != "cpu":
        tensors[_TOKENS] = host_side.get(_TOKENS, ids)
    # All of a device in one transfer, so that a forward costs at most one device sync.
    host = {name: host_values(tensor.long()) for name, tensor in on_host(tensors).items()}
    tokens, positions = host.pop(_TOKENS, None), host.get("position_ids")
    if _declares_nothing(host):
        return Declared(None, positions=positions, tokens=tokens)
    mask = host.get("attention_mask", host.get(_PREPARED, np.ones(shape)))
    real = mask != 0
    if (mask < 0).any():
        raise InvalidPacking(
            "attention_mask must hold 0 and 1, or segment ids with 0 for padding; found negative or fractional values. "
            "An additive mask must be four-dimensional, and cannot be combined with packed rows.",
            code="declaration-invalid",
        )
    declarations = dict(_declarations(host, real))
    # The first real token of a row starts a document whether it is said or not.
    first = first_of_row(real)
    later = real & ~first
    jumps, are_own, others = False, False, [starts for name, starts in declarations.items() if name != "position_ids"]
    if positions is not None:
        starting = declarations["position_ids"] & later
        anew = _begins(positions, first, first_position, continues)
        if any_positions and others and not continues:
            are_own = bool((starting & ~others[0] & ~anew).any())
        jumps = bool(starting.any()) and not anew[starting].any()
        if are_own or jumps:
            del declarations["position_ids"]
        jumps &= not (are_own or continues)
    if _SECTIONS in host:
        declarations[_SECTIONS] = section_starts(host[_SECTIONS], real, later, declarations)
    _check_agreement(declarations, later)
    # Packed means that some row holds a second document; whatever else is declared, the call is an ordinary one.
    packing = [starts for starts in declarations.values() if (starts & later).any()]
    starts = packing[0] if packing else others[0] if are_own else None
    if starts is None:
        if real.all() or _PREPARED in host:
            return Declared(None, positions=positions, jumps=jumps, tokens=tokens)
        counted = host["labels"] != ignored_label if "labels" in host else np.zeros(shape, dtype=bool)
        if "shift_labels" in host:  # which stand a column before their tokens, and are used in place of labels
            counted = np.pad(host["shift_labels"][:, :-1] != ignored_label, ((0, 0), (1, 0)))
        labelled, after = bool(counted[~real].any()), bool((counted[:, 1:] & real[:, 1:] & ~real[:, :-1]).any())
        return Declared(None, real, positions, labelled, after, jumps, tokens=tokens)
    slots = max([host[name].size for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in host], default=0)
    layout = PackedLayout.from_starts(_with_padding(starts, real, later), device, positions, real, slots)
    for name in ("max_length_q", "max_length_k"):
        value = arguments.get(name)
        # A tensor is not read: it would cost a device sync, and the layout does not need it.
        if isinstance(value, int) and real.all() and value < layout.max_seqlen:
            raise InvalidPacking(
                f"{name} must be at least the longest document, {layout.max_seqlen} tokens; found {value}",
                code="declaration-invalid",
            )
    ones = "attention_mask" in host and declarations.keys() == {"position_ids"} and bool((mask == 1).all())
    return Declared(layout, None if real.all() else real, positions, beside_ones=ones, tokens=tokens)


def _declares_nothing(host: Mapping[str, np.ndarray]) -> bool:
    """Return True if all are tokens with positions that count on by one, as in most calls; this is
    cheap."""
    if not host.keys() <= {"attention_mask", "position_ids", "labels", "shift_labels"}:
        return False
    mask, positions = host.get("attention_mask"), host.get("position_ids")
    if mask is not None and not (mask == 1).all():
        return False
    return positions is None or bool((positions[:, :1] >= 0).all() and (np.diff(positions, axis=1) == 1).all())


def _tensors(
    arguments: Mapping[str, Any],
    known: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    device: torch.device,
    continues: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    rows, columns = shape
    given = {**arguments, **known}
    position_ids = given.get("position_ids")
    if position_ids is not None:
        # Times of three sections may be fractions (Qwen3-Omni).
        sections = isinstance(position_ids, torch.Tensor) and position_ids.dim() == 3 == len(position_ids)
        _check_tensor("position_ids", arguments["position_ids"], device, fractions=sections)
        if position_ids.dim() == 3 and position_ids.shape[0] in (3, 4) and position_ids.shape[1:] == shape:
            # M-RoPE. With four sections the first holds text positions.
            if len(position_ids) == 4:
                yield "position_ids", position_ids[0]
            else:
                yield _SECTIONS, in_one(position_ids)
        elif position_ids.shape in (shape, (1, columns)):
            yield "position_ids", position_ids.expand(shape)
        else:
            raise InvalidPacking(
                f"position_ids must have the shape of the batch, ({rows}, {columns}), or (1, {columns}), or "
                f"(3 or 4, {rows}, {columns}) for M-RoPE; found {tuple(position_ids.shape)}",
                code="declaration-invalid",
            )
    mask = given.get("attention_mask")
    if continues and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        mask = mask[:, -columns:]
    # Dicts of masks and BlockMask are prepared by the caller: the entry deals with them.
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == shape:
        _check_device("attention_mask", arguments["attention_mask"], device)
        if mask.is_floating_point():  # what is no whole number must not become one unseen
            mask = mask.where((mask == mask.round()) & mask.isfinite(), -1)
        yield "attention_mask", mask
        for name in ("labels", "shift_labels"):
            labels = given.get(name)
            if isinstance(labels, torch.Tensor) and labels.shape == shape:
                yield name, labels
    elif isinstance(mask, torch.Tensor) and prepared.is_readable(mask, shape):
        _check_device("attention_mask", arguments["attention_mask"], device)
        yield _PREPARED, prepared.sees_itself(mask).expand(shape)
    for name in _READ_BY_STARTS:
        value = given.get(name)
        if value is not None:
            _check_tensor(name, arguments[name], device)
            if tuple(value.shape) != shape:
                raise InvalidPacking(
                    f"{name} must have the shape ({rows}, {columns}); found {tuple(value.shape)}",
                    code="declaration-invalid",
                )
            yield name, value
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        value = given.get(name)
        if value is not None:
            _check_tensor(name, value, None)
            if value.dim() != 1 or len(value) < 2:
                raise InvalidPacking(
                    f"{name} must have the shape (documents + 1,), documents >= 1; found {tuple(value.shape)}",
                    code="declaration-invalid",
                )
            yield name, value


def _check_tensor(name: str, value: Any, device: torch.device | None, fractions: bool = False) -> None:
    if not isinstance(value, torch.Tensor):
        raise InvalidPacking(
            f"{name} must be an integer tensor; found {type(value).__name__}", code="declaration-invalid"
        )
    if (value.is_floating_point() and not fractions) or value.is_complex() or value.dtype == torch.bool:
        raise InvalidPacking(f"{name} must be an integer tensor; found dtype {value.dtype}", code="declaration-invalid")
    if device is not None:
        _check_device(name, value, device)


def _check_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise InvalidPacking(
            f"{name} must lie on the device of the inputs, {device}; found {value.device}. Move it with "
            f"`.to({device})`",
            code="declaration-invalid",
        )


def _declarations(host: dict[str, np.ndarray], real: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each declaration: a name for messages, and True where a document starts, (rows,
    columns)."""
    if "position_ids" in host:
        yield "position_ids", _position_starts(host["position_ids"], real)
    mask = host.get("attention_mask")
    if mask is not None and mask.max(initial=0) > 1:
        yield "attention_mask (segment ids)", segment_starts(mask)
    for name, starts in _READ_BY_STARTS.items():
        if name in host:
            yield name, starts(host[name])
    if "cu_seq_lens_q" in host or "cu_seq_lens_k" in host:
        yield "cu_seq_lens_q/k", cumulative_starts(host, real)


def _position_starts(positions: np.ndarray, real: np.ndarray) -> np.ndarray:
    if (positions[real] < 0).any():
        raise InvalidPacking(
            f"position_ids must not be negative; found {int(positions[real].min())}", code="declaration-invalid"
        )
    starts = np.diff(positions, axis=1, prepend=positions[:, :1]) != 1
    for row in np.flatnonzero(~real.all(axis=1)):
        # Across a run of padding a document may go on with the next position or with the next column's.
        columns = np.flatnonzero(real[row])
        step = np.diff(positions[row, columns])
        starts[row, columns[1:]] = (step != 1) & (step != np.diff(columns))
    return starts


def _begins(positions: np.ndarray, first: np.ndarray, first_position: int, continues: bool) -> np.ndarray:
    """Return True where positions may begin anew: at 0, `first_position`, or the row's first.

    The row's first position does not count if the row continues a cache. Positions that do not go
    on by one declare documents only if they begin anew somewhere: generation counts on after
    padding, and scripts that stretch positions leave gaps.
    """
    of_row = np.where(first, positions, 0).sum(axis=1, keepdims=True)
    return (positions == 0) | (positions == first_position) | ((positions == of_row) & (not continues))


def _check_agreement(declarations: dict[str, np.ndarray], later: np.ndarray) -> None:
    for one, other in pairwise(declarations):
        differs = (declarations[one] != declarations[other]) & later
        if differs.any():
            row, column = np.argwhere(differs)[0]
            starting, silent = (one, other) if declarations[one][row, column] else (other, one)
            raise InvalidPacking(
                f"two declarations disagree: by {starting} a document starts at row {row}, column {column}, "
                f"by {silent} none does. Pass one of them, or make them agree.",
                code="documents-unclear",
            )


def first_of_row(real: np.ndarray) -> np.ndarray:
    """Return True at the first real token of each row; all arrays are (rows, columns)."""
    return real & (np.cumsum(real, axis=1) == 1)


def _with_padding(starts: np.ndarray, real: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Make every run of padding a document of its own; refuse padding inside a document."""
    edges = np.diff(real, axis=1, prepend=~real[:, :1])
    resumed = edges & later & ~starts
    if resumed.any():
        row, column = np.argwhere(resumed)[0]
        raise InvalidPacking(
            f"padding lies inside a document: at row {row}, column {column} a document goes on after masked tokens. "
            f"Between packed documents padding is fine, inside one it is not; remove the masked tokens.",
            code="declaration-invalid",
        )
    return (starts & real) | edges
