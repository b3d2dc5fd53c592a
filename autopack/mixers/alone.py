"""Run modules on the documents of packed rows as if each were alone: own attention code, and whole
models.

Documents of one length share a batch, so nothing is padded. A whole model is the last resort, if
nothing smaller keeps documents apart: it costs as much as stock with documents sorted by length. It
gains no fewer and fuller calls, as packing does elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.family import MixerCall, Way
from autopack.inspection.source import shifts_labels
from autopack.layout import IGNORED_LABEL
from autopack.layout.forms import Frame
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import (
    Batches,
    Grouping,
    TokenMap,
    each_by_itself,
    each_part,
    equally_long,
    equally_long_documents,
    items_of_share,
    mean_loss,
    spread_tokens,
)
from autopack.layout.ways import CACHES
from autopack.runtime.in_graph import merged
from autopack.runtime.runs import with_idle
from autopack.runtime.scope import running_scope, without_layout

# arguments that hold what an encoder has made
_STATES = ("key_value_states", "encoder_hidden_states")
MASKS = ("attention_mask", "mask", "attn_mask")


@dataclass(frozen=True)
class Alone(Way):
    """Strategy for attention in a model's own code: documents of one length run as a batch.

    Nothing is padded: the code applies masks, biases and positions to a document as if it were
    alone.

    * `per_head` names biases (rows x heads, 1, columns); a document alone has their beginning.
    * `by_columns` is True if padding changes its positions, `reads_padding` if the contents of
      padding change its results for tokens.
    * `from_zero` is True if it cuts its table of rotations to the number of tokens, so that
      positions have to count from the first token of each document.
    """

    per_head: tuple[str, ...] = ()
    by_columns: bool = False
    reads_padding: bool = False
    from_zero: bool = False
    attends = True
    recurs = False

    @property
    def counts(self) -> bool:  # type: ignore[override]
        """True if the mixer numbers tokens by columns."""
        return self.by_columns

    def run(self, call: MixerCall, bias: Tensor | None = None) -> Any:
        """Run an attention module on batches of documents alone; return its output for the rows.

        `bias` is the longest document's, (1, heads, tokens or 1, tokens or 1), for a module that
        takes a `position_bias` with its mask added already: documents get their parts of both.
        """
        call.check()
        # Upstream's flex function looks for a bias of each row, and fails by one that all rows of a
        # batch share.
        by_row = (
            getattr(getattr(call.mixer, "config", None), "_attn_implementation", None)
            == "flex_attention"
        )
        found, read = pairs_of(call.layout, call.memory, each_by_itself if by_row else equally_long)

        def run(ours: TokenMap, theirs: TokenMap | None) -> Any:
            if theirs is None:
                return call.changed(
                    lambda name, value: self._argument_within(call, bias, ours, name, value)
                )
            return call.changed(
                lambda name, value: _argument_across(bias, ours, theirs, name, value)
            )

        with without_layout():  # such code may go on to transformers' interface
            outputs = [run(*pair) for pair in zip(found.maps, read, strict=True)]
        whole = found.together(outputs)
        return (
            _with_weights(call, found.maps, whole, outputs)
            if call.want_weights and call.memory is None
            else whole
        )

    def _argument_within(
        self,
        call: MixerCall,
        bias: Tensor | None,
        batch: TokenMap,
        name: str,
        value: Any,
    ) -> Any:
        """Return an argument of a call for attention within each document of `batch`."""
        layout, (documents, length) = call.layout, batch.into
        if name in CACHES or (bias is not None and name == "mask"):
            return None
        if bias is not None and name == "position_bias":
            mask = call.arguments.get("mask")
            own = bias[..., :length, :length]
            return own + _square_of_any_form(batch, mask) if isinstance(mask, Tensor) else own
        if isinstance(value, DocumentMask):
            return _mask_of_batch(value, batch)
        if not isinstance(value, Tensor):
            return spread_tokens(value, batch.shape, batch.gather)
        if name == "cache_position":
            return value[:length]
        if name == "position_ids" and self.from_zero:
            positions = spread_tokens(value, batch.shape, batch.gather)
            return positions - positions[:, :1]
        if name in self.per_head:
            heads = value.shape[0] // layout.rows
            return value[:heads, :, :length].repeat(documents, 1, 1)
        if name in ("relative_distance", "relative_pos"):  # the same for all rows
            return value[..., :length, :length]
        of_pairs = (
            name == "position_bias"
            or name.endswith("_mask")
            or value.shape[-2:] == (layout.columns,) * 2
        )
        if name in MASKS or (value.dim() == 4 and of_pairs):
            return _square_of_any_form(batch, value)
        return spread_tokens(value, batch.shape, batch.gather)


def _with_weights(call: MixerCall, found: list[TokenMap], whole: Any, outputs: list[Any]) -> Any:
    """Return output `whole` with batches' weights as blocks of (rows, heads, columns, columns)."""
    rows, columns = call.layout.rows, call.layout.columns

    def merged(whole: Any, *parts: Any) -> Any:
        pairs = list(zip(parts, found, strict=True))
        if not all(
            isinstance(t, Tensor) and t.dim() == 4 and t.shape[::2] == b.into for t, b in pairs
        ):
            return whole
        blocks = parts[0].new_zeros(rows, parts[0].shape[1], columns, columns)
        for part, batch in pairs:
            for start, weights in zip(batch.starts.tolist(), part, strict=True):
                row, first = divmod(start, columns)
                here = slice(first, first + batch.into[1])
                blocks[row, :, here, here] = weights
        return blocks

    return each_part(merged, whole, *outputs)


def _square_of_any_form(batch: TokenMap, mask: Tensor) -> Tensor:
    """Return `square` of a mask or bias, also if queries precede heads or one is for all rows."""
    rows, columns = batch.shape
    if mask.dim() == 2 and len(mask) == columns > rows:  # one for all rows (CTRL)
        return mask[: batch.into[1], : batch.into[1]]
    # queries before heads (GPT-BigCode)
    if mask.dim() == 4 and mask.shape[1] == columns and mask.shape[2] == 1:
        return square(batch, mask.transpose(1, 2)).transpose(1, 2)
    return square(batch, mask)


def square(batch: TokenMap, mask: Tensor) -> Tensor:
    """Return each document's part of a mask or bias (rows or 1, ..., columns or 1, columns).

    The result is (documents, ..., tokens or 1, tokens). Some releases make masks for one key too
    many. Raises `UnsupportedModel` for a mask of other rows, such as the padded batch.
    """
    rows, columns = batch.shape
    queries = columns if mask.dim() == 2 or mask.shape[-2] == 1 else mask.shape[-2]
    known = (columns, columns + 1)
    if len(mask) not in (1, rows) or queries not in known or mask.shape[-1] not in known:
        raise UnsupportedModel(
            f"attention got a mask of the shape {tuple(mask.shape)} for {rows} packed rows of "
            f"{columns} columns, so what of it belongs to a document cannot be told. Run the "
            "documents one per row.",
            code="other-tokens",
        )
    column = batch.where % columns
    row = batch.where[:, 0] // columns
    row = row if len(mask) > 1 else row * 0
    return _pairs(mask, row, column, column)


def _pairs(mask: Tensor, row: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return a mask at each document's row, `queries` and `keys`: (documents, ..., q, k)."""
    if mask.dim() == 2:
        return mask[row[:, None], keys]
    queries = queries if mask.shape[-2] > 1 else queries[:, :1] * 0
    between = [slice(None)] * (mask.dim() - 3)
    places: Any = (row[:, None, None], *between, queries[:, :, None], keys[:, None])
    return mask[places].movedim((1, 2), (-2, -1))


def _argument_across(
    bias: Tensor | None, ours: TokenMap, theirs: TokenMap, name: str, value: Any
) -> Any:
    """Return an argument of a call for cross-attention from documents `ours` to states `theirs`."""
    if name in CACHES or isinstance(value, DocumentMask):
        return None  # all that a document's encoder has made is seen
    if bias is not None and name in ("mask", "position_bias"):
        return bias if name == "position_bias" else None
    if name in _STATES:
        return theirs.gather(value)
    if name in MASKS and isinstance(value, Tensor) and value.shape[-1] == theirs.shape[1]:
        row = ours.where[:, 0] * 0
        return _pairs(value.expand(1, *value.shape[1:]), row, ours.where, theirs.where)
    return spread_tokens(value, ours.shape, ours.gather)


def pairs_of(
    layout: PackedLayout, memory: PackedLayout | None, alone: Grouping
) -> tuple[Batches, Sequence[TokenMap | None]]:
    """Return (batches of documents grouped by `alone`, their encoder documents or a None for each).

    The second result holds the documents that the encoder has read, batch by batch. Pairs alike in
    both lengths share a batch, unless no documents do.
    """
    if memory is None:
        found = Batches.grouped(layout, alone)
        return found, [None] * len(found.maps)

    def build() -> tuple[Batches, list[TokenMap]]:
        kinds, number = np.unique(
            np.stack([layout.lengths, memory.lengths]), axis=1, return_inverse=True
        )
        alike = [np.flatnonzero(number.reshape(-1) == kind) for kind in range(kinds.shape[1])]
        chosen = alone(layout) if alone is each_by_itself else alike
        return Batches.of(layout, chosen), [
            TokenMap.of_documents(memory, group) for group in chosen
        ]

    return layout.derived(("batches of pairs", memory), build)


def _mask_of_batch(mask: DocumentMask, batch: TokenMap) -> Any:
    """Return the mask of a batch of equally long documents, or None if stock makes none."""
    columns = mask.layout.columns
    first = batch.starts.tolist() if mask.absolute else [0]
    documents, length = batch.into
    masks = [
        mask.for_document(start // columns, start % columns, start % columns + length)
        for start in first
    ]
    made = [each for each in masks if each is not None]
    # a BlockMask, the same for every document of one length
    if made and not isinstance(made[0], Tensor):
        if mask.absolute:
            raise UnsupportedModel(
                "a rule over tokens of the row cannot be cut into block masks; use sdpa or eager",
                code="backend-unavailable",
            )
        return made[0]
    return torch.cat(made).expand(documents, -1, -1, -1) if made else None


def run_documents_alone(call: MixerCall, numbers_itself: bool = False) -> Any:
    """Run a model, or half of a pair, on batches of documents; return its output for the rows.

    Outputs per token (rows, columns, ...) come back as for packed rows. The loss is the mean over
    the labels of all documents (or, if the model's loss counts so, their sum over
    `num_items_in_batch`). Other outputs are left out. With `numbers_itself`, positions that count
    from 0 are not handed on. Raises `UnsupportedModel` if the output has a loss of routers.
    """
    layout = call.layout
    frame = Frame(layout.rows, layout.columns)
    found, read = pairs_of(layout, call.memory, equally_long_documents)
    wants_tuple = call.arguments.get("return_dict") is False

    def spread(name: str, value: Any, batch: TokenMap, memory: TokenMap | None) -> Any:
        if memory is not None and name in _STATES:
            return memory.gather(value)
        return frame.changed(name, value, batch.gather)

    pairs = zip(found.maps, read, strict=True)
    every = [
        {name: spread(name, value, *pair) for name, value in call.arguments.items()}
        for pair in pairs
    ]
    counts = _label_counts(call.mixer, [given.get("labels") for given in every])
    scope = running_scope()
    in_step = scope is not None and scope.in_step
    outputs = []
    for given, count in zip(every, counts, strict=True):
        if numbers_itself and count_from_zero(given.get("position_ids")):
            given["position_ids"] = None
        if not count and given.get("labels") is not None:
            # Its mean would be that of nothing. In step with others its loss is in the graph all
            # the same.
            given["labels"] = torch.zeros_like(given["labels"]) if in_step else None
        given |= items_of_share(given, count, sum(counts))
        with without_layout():
            outputs.append(call.original(call.mixer, **{**given, "return_dict": True}))
        if any(outputs[-1].get(name) is not None for name in ("aux_loss", "router_logits")):
            raise UnsupportedModel(
                f"{type(call.mixer).__name__} runs the documents of packed rows one after another, "
                "and the loss of its routers is not the mean of theirs. Set "
                "output_router_logits=False, or pass padded batches.",
                code="output-asked",
            )
    loss = None
    if call.arguments.get("labels") is not None:
        losses = [output.get("loss") for output in outputs]
        loss = mean_loss(losses, counts, layout.device)
        loss = with_idle(loss, [each for each, n in zip(losses, counts, strict=True) if not n])
    return merged(
        outputs, lambda _, parts: found.together(parts, lambda parts: None), loss, wants_tuple
    )


def count_from_zero(positions: Any) -> bool:
    """Return True for a tensor of positions 0, 1, 2 and so on in every row."""
    if not isinstance(positions, Tensor):
        return False
    return torch.equal(
        positions,
        torch.arange(positions.shape[-1], device=positions.device).expand_as(positions),
    )


def _label_counts(model: Any, labels: list[Tensor | None]) -> list[int]:
    """Return the number of labels that each batch's loss uses; all 0 if a batch has no labels."""
    given = [each for each in labels if each is not None]
    if len(given) < len(labels):
        return [0] * len(labels)
    seen = [each[:, 1:] if shifts_labels(model) else each for each in given]
    return host_values(torch.stack([(each != IGNORED_LABEL).sum() for each in seen])).tolist()
