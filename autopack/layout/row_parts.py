"""Cut rows into the parts that the ranks of a sequence-parallel group get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopack.errors import InvalidPacking
from autopack.layout import IGNORED_LABEL, declarations
from autopack.layout.packed import PackedLayout, without_boundaries
from autopack.layout.ways import LAYOUT_KWARGS

_MADE_ANEW = (*LAYOUT_KWARGS, "attention_mask", "position_ids", "labels", "shift_labels")


def shard_rows(
    batch: Mapping[str, Any],
    rank: int,
    ranks: int,
    *,
    shift_labels: bool = True,
    pad_token_id: int = 0,
    ignored_label: int = IGNORED_LABEL,
) -> dict[str, Any]:
    """Return one rank's columns of a batch of packed rows that every rank has as a whole.

    Rank i gets the i-th of `ranks` equal runs of columns of every row, after padding to a multiple
    of `ranks`. Declarations of documents, in any form that an enabled model takes, become
    `position_ids` that restart at each of them (or the batch's own, if it has any), `seq_idx` if
    the batch has it, and an `attention_mask` of 0 and 1 if there is padding. Call a model enabled
    with `sequence_parallel=` the group with it.

    Args:
        batch: Tensors of a collator: `input_ids` (rows, columns) integers, and others of that
            shape, which are cut alike. Other values go on as they are.
        rank: Number of the part, from 0.
        ranks: Number of parts.
        shift_labels: `True` if the model predicts the next token. The last token of a part is then
            compared with the first of the next one, so labels become `shift_labels`, which stand at
            the token that predicts them, without those that a document alone would not have;
            `labels` are the same, as transformers computes no loss without. `num_items_in_batch`,
            if the batch has none, counts them in whole rows: losses of all parts add up to the mean
            over them.
        pad_token_id: Token at columns that are added.
        ignored_label: Label that the loss leaves out.

    Returns:
        A dict of the part, its tensors (rows, columns / ranks), contiguous.

    Raises:
        InvalidPacking: The batch declares its documents wrongly, or has a tensor of another shape.
        ValueError: `rank` is none of `ranks`.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be one of {ranks} ranks, 0 to {ranks - 1}; found {rank}")
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise InvalidPacking(
            "a batch whose rows are to be shared needs input_ids, a tensor (rows, columns)",
            code="parts-of-rows",
        )
    rows, columns = shape = tuple(ids.shape)
    declared = declarations.read(batch, (rows, columns), ids.device, ignored_label=ignored_label)
    real = declared.real_of(shape)
    layout = declared.layout or PackedLayout.of_padded(real, ids.device)
    more = -columns % ranks
    found = {name: value for name, value in batch.items() if not isinstance(value, Tensor)}
    whole = {"input_ids": ids, "position_ids": _positions(batch, declared.layout, ids)}
    if batch.get("seq_idx") is not None:
        whole["seq_idx"] = layout.seq_idx.long()
    if more or declared.real is not None:
        whole["attention_mask"] = torch.from_numpy(real).to(ids)
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None and labels is not None:
        shifted = pad(labels, (0, 1), value=ignored_label)[:, 1:]
    if labels is not None and not shift_labels:
        whole["labels"] = labels
    if shifted is not None and shift_labels:
        shifted = without_boundaries(shifted, layout, shifted=True, ignored=ignored_label)
        whole |= {"labels": shifted, "shift_labels": shifted}
        found["num_items_in_batch"] = int((shifted != ignored_label).sum())
    if batch.get("num_items_in_batch") is not None:  # of several batches that make one step
        found["num_items_in_batch"] = int(batch["num_items_in_batch"])
    for name, value in batch.items():
        if name in {*whole, *found, *_MADE_ANEW} or not isinstance(value, Tensor):
            continue
        if value.shape != shape:
            raise InvalidPacking(
                f"{name} must be a tensor of the shape of input_ids, {shape}, so that it can be "
                f"cut like them; found {tuple(value.shape)}",
                code="parts-of-rows",
            )
        whole[name] = value
    fills = {"input_ids": pad_token_id, "seq_idx": len(layout.lengths)}
    fills |= {"labels": ignored_label, "shift_labels": ignored_label}
    part = (columns + more) // ranks
    for name, value in whole.items():
        padded = pad(value, (0, more), value=fills.get(name, 0))
        if name == "position_ids":  # padding is numbered too, as any document is
            padded[:, columns:] = torch.arange(more, device=ids.device)
        found[name] = padded[:, rank * part : (rank + 1) * part].contiguous()
    return found


def _positions(batch: Mapping[str, Any], layout: PackedLayout | None, ids: Tensor) -> Tensor:
    """Return positions (rows, columns), the batch's or counted anew; raise for several sections."""
    given = batch.get("position_ids")
    if given is None and layout is not None:
        given = layout.position_ids()
    if given is None:
        given = torch.arange(ids.shape[1], device=ids.device)
    if given.dim() > 2:
        raise InvalidPacking(
            "position_ids must be (rows, columns) where ranks share rows, not of several "
            f"sections; found {tuple(given.shape)}",
            code="parts-of-rows",
        )
    return given.expand(ids.shape)
