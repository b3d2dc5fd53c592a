"""Packed rows for heads with one result per row: the call becomes one whose rows are the documents.

Most heads get the documents as a right-padded batch; the backbone inside runs the real tokens as one packed row and
hands the head the padded states, as it does for any padded batch. Where that cannot be the same as each document
alone, the whole model runs on documents of one length at a time (`autopack.calls.heads.length_batches`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopack.calls.call import Call
from autopack.calls.heads.document_arguments import DocumentArguments
from autopack.calls.heads.length_batches import DocumentsAlone
from autopack.calls.packed import without_what_packing_drops
from autopack.calls.plan import HeadDocuments, Plan
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import heads
from autopack.inspection.configs import text_config
from autopack.layout.packed import PackedLayout
from autopack.runtime.scope import Scope
from autopack.runtime.tally import Volume


def plan(call: Call, layout: PackedLayout) -> Plan:
    """What a call of such a head with packed rows is run as.

    Raises `InvalidPacking` for labels that are not per document, and `UnsupportedModel` for what cannot be told apart.
    """
    head = call.entry.head
    assert head is not None
    given = DocumentArguments(head, without_what_packing_drops(call, call.arguments), layout)
    if heads.looks_for_padding(call.module) and text_config(call.config).pad_token_id is None:
        raise UnsupportedModel(
            f"{head.name} finds the last token of each of several rows by config.pad_token_id, which is None. Set "
            f"model.config.pad_token_id to a token that no document ends with, as for padded batches."
        )
    alone = call.wants_weights or call.entry.runs_alone is not None or _ends_elsewhere(call.module, given)
    return DocumentsAlone(call, given) if alone else PaddedDocuments(call, given)


def plan_of_pair(call: Call, layout: PackedLayout) -> Plan:
    """The same for such a head of an encoder-decoder that makes the decoder's tokens of the encoder's.

    Its decoder reads padding, so its documents always run alone. Raises `InvalidPacking` for positions that such a
    model cannot be told.
    """
    head = call.entry.head
    assert head is not None
    given = without_what_packing_drops(call, call.arguments)
    if "use_cache" not in call.entry.names:
        given.pop("use_cache", None)  # T5Gemma's hands its own on, beside those that it does not name
    if "position_ids" not in call.entry.names:
        given.pop("position_ids", None)
        first, padding = layout.first_positions, layout.is_padding
        if first is not None and (first if padding is None else first[~padding]).any():
            raise InvalidPacking(
                f"position_ids of a document begin at {int(first.max())}, but {call.name} takes none and numbers the "
                f"first token of every document 0. Let them begin at 0."
            )
    # With FlexAttention stock looks up T5's bias, of one row, by the number of the row.
    together = "flex_attention" not in call.model.implementations()
    return DocumentsAlone(call, DocumentArguments(head, given, layout), together)


def _ends_elsewhere(module: Any, given: DocumentArguments) -> bool:
    """Whether a head that looks for padding would find another token in a padded batch than in a document alone."""
    ids = given.arguments.get("input_ids")
    if ids is None:
        return heads.looks_for_padding(module)  # it takes the last column of embeddings
    if not heads.takes_first_padding(module):
        return False
    first = ids.reshape(-1)[torch.from_numpy(given.batch.starts).to(ids.device)]
    return bool((first == text_config(module.config).pad_token_id).any())


class PaddedDocuments(Plan):
    """The documents of a packed call as a right-padded batch, whose backbone is to run without the padding."""

    what = "becomes a batch of its documents, and is left to the model inside"
    reason = "it declares documents, and its head gives one result per row"
    documents: HeadDocuments
    packs = True

    def __init__(self, call: Call, given: DocumentArguments):
        super().__init__(Scope(call.model))
        self.documents = HeadDocuments(given.head.name)
        self.volume = Volume.of_layout(given.batch.layout).without_padding()
        self.spans = given.head.spans
        self.batch = given.batch
        self.defers = self.batch.is_padded
        self.masked = False
        """Whether the head's logits of starts and ends at padding have been taken out."""
        self.arguments = given.map(self._spread, lambda value: value)
        if not self.batch.is_padded:
            return
        self.arguments["attention_mask"] = self.batch.mask.long()
        pad_token_id, ids = text_config(call.config).pad_token_id, self.arguments.get("input_ids")
        if isinstance(pad_token_id, int) and ids is not None:
            # Heads of decoders look for the last token that is no padding token.
            self.arguments["input_ids"] = ids.masked_fill(~self.batch.mask.to(ids.device), pad_token_id)
        for name in given.head.labels if self.spans else ():
            self.arguments[name] = self._left_out(self.arguments.get(name))

    def _spread(self, name: str, value: torch.Tensor) -> torch.Tensor:
        rows, real = self.batch.spread(value), self.batch.mask.to(value.device)
        if name == "position_ids":
            # Counted on in padding: where a model hides the mask, they must not look like those of another document.
            return rows.where(real, rows[:, :1] + torch.arange(rows.shape[1], device=rows.device))
        return rows.masked_fill(~real.reshape(*real.shape, *[1] * (rows.dim() - 2)), 0)

    def _left_out(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        """A position at the end of its document is ignored by the loss, and so must be at the end of the batch."""
        if positions is None:
            return None
        lengths = torch.from_numpy(self.batch.lengths).to(positions.device).reshape(-1, *[1] * (positions.dim() - 1))
        return positions.masked_fill(positions >= lengths, self.batch.shape[1])

    def span_logits(self, output: Any) -> torch.Tensor | None:
        """Logits of starts and ends (documents, longest, 2), the least of their dtype at padding; None for all else."""
        wanted = (*self.batch.shape, 2)
        if not self.batch.is_padded or not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
            return None
        self.masked = True
        return output.masked_fill(~self.batch.mask.to(output.device)[..., None], torch.finfo(output.dtype).min)

    @torch._dynamo.disable
    def finish(self, module: nn.Module, output: Any) -> Any:
        """Raise `UnsupportedModel` where padding may have had a part in the output."""
        if self.batch.is_padded and not self.documents.unpadded:
            raise UnsupportedModel(
                f"{self.documents.head} did not call its backbone, so the documents of packed rows were run with "
                f"padding. Run them one per row."
            )
        if self.batch.is_padded and self.spans and not self.masked:
            raise UnsupportedModel(
                f"no module of {self.documents.head} gave the logits of starts and ends, (documents, longest, 2), so "
                f"padding would have a part in its loss. Run its documents one per row."
            )
        return None
