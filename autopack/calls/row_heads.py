"""Packed rows for heads with one result per row: the call becomes one whose rows are the documents.

Most heads get the documents as a right-padded batch; the backbone inside runs the real tokens as
one packed row and hands the head the padded states, as it does for any padded batch. Where that may
differ from each document alone, the whole model runs on documents of one length at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopack.calls.call import Call, CallPlan
from autopack.calls.padding_rules import Delegate
from autopack.calls.rows import without_what_packing_drops
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import heads
from autopack.inspection.configs import text_config
from autopack.layout import IGNORED_LABEL
from autopack.layout.forms import AXES, Frame, described
from autopack.layout.host import host_values, recall, remember, upload
from autopack.layout.packed import PackedLayout, real_documents
from autopack.layout.token_map import TokenMap, by_length, in_order, items_of_share, mean_loss
from autopack.runtime.in_graph import merged
from autopack.runtime.runs import Buffers
from autopack.runtime.scope import Activation, Scope, in_force
from autopack.runtime.tally import Volume


def plan(call: Call, layout: PackedLayout) -> CallPlan:
    """Return the plan of packed rows at a per-row head; raise for wrong labels or positions.

    The decoder of an encoder-decoder, whose tokens such a head makes of the encoder's, reads
    padding, so its documents always run alone. Raises `InvalidPacking` for labels that are not per
    document and positions that the model cannot take, and `UnsupportedModel` for arguments that
    cannot be split.
    """
    entry, arguments = call.entry, without_what_packing_drops(call, call.arguments)
    if entry.is_pair and "position_ids" not in entry.names:
        arguments.pop("position_ids", None)
        first = layout.first_positions
        if first is not None and first[real_documents(layout)].any():
            raise InvalidPacking(
                f"position_ids of a document begin at {int(first.max())}, but {call.name} takes "
                "none and numbers the first token of every document 0. Let them begin at 0.",
                code="first-position",
            )
    given = DocumentArguments(call, arguments, layout)
    if entry.is_pair:
        # With FlexAttention stock looks up T5's bias, of one row, by the number of the row.
        return PerDocument(call, given, "flex_attention" not in call.model.implementations())
    if heads.looks_for_padding(call.module) and text_config(call.config).pad_token_id is None:
        raise UnsupportedModel(
            f"{given.head.name} finds the last token of each of several rows by "
            "config.pad_token_id, which is None. Set model.config.pad_token_id to a token that no "
            "document ends with, as for padded batches.",
            code="pad-token",
        )
    if call.wants_weights or entry.runs_alone is not None or _ends_elsewhere(call.module, given):
        return PerDocument(call, given)
    return PaddedDocuments(call, given)


def _ends_elsewhere(module: Any, given: DocumentArguments) -> bool:
    """Return True if a head may find another last token of a document in a batch than alone."""
    ids = given.arguments.get("input_ids")
    if ids is None:
        return heads.looks_for_padding(module)  # it takes the last column of embeddings
    if not heads.takes_first_padding(module):
        return False
    first = host_values(ids).reshape(-1)[given.batch.starts]
    return bool((first == text_config(module.config).pad_token_id).any())


class DocumentArguments:
    """Arguments of packed rows at a per-row head, with values per token or per document.

    Raises `InvalidPacking` for labels that are not one per document.
    """

    def __init__(self, call: Call, arguments: dict[str, Any], layout: PackedLayout):
        assert call.entry.head is not None
        self.head, self.arguments, self.layout = call.entry.head, arguments, layout
        self.batch = TokenMap.of_documents(layout)
        """The documents, in order, as rows."""
        self.numbers = np.flatnonzero(real_documents(layout))
        """The numbers of the documents in the layout; padding is none."""
        self.documents = len(self.numbers)
        frame = Frame(*self.batch.shape, self.documents, self.head.labels)
        self.changed = partial(frame.all_changed, arguments)
        """Returns the arguments, changed by functions of values per token and per document."""
        self.left_out: list[str] = []
        """The labels that are, for some document, its length, which leaves it out of the loss."""
        for name in self.head.labels:
            value = arguments.get(name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or not value.dim() or len(value) != self.documents:
                lengths = ", ".join(map(str, self.batch.lengths[:8]))
                raise InvalidPacking(
                    f"{name} of {self.head.name} must have one entry per document on packed rows, "
                    f"({self.documents},) or ({self.documents}, K); found {described(value)}. The "
                    f"{layout.rows} x {layout.columns} tokens hold {self.documents} documents of "
                    f"{lengths}{', ...' if self.documents > 8 else ''} tokens, in order; padding "
                    "counts unless attention_mask is 0 there.",
                    code="wrong-labels",
                )
            if not self.head.spans:
                continue
            at = host_values(value).reshape(self.documents, -1)[:, 0]
            self.left_out += [name] if (at == self.batch.lengths).any() else []
            wrong = np.flatnonzero((at < 0) | (at > self.batch.lengths))
            if len(wrong):
                raise InvalidPacking(
                    f"{name} counts from the start of each document and must lie in 0 ... its "
                    "length (which stands for no answer inside, and is left out of the loss); "
                    f"document {wrong[0]} has {self.batch.lengths[wrong[0]]} tokens, found "
                    f"{at[wrong[0]]}. Subtract the document's first column from positions in the "
                    "row.",
                    code="wrong-labels",
                )


class PaddedDocuments(Delegate):
    """Plan that runs packed documents as a padded batch, and the backbone without padding."""

    what = "becomes a batch of its documents, and is left to the model inside"
    packs = True

    def __init__(self, call: Call, given: DocumentArguments):
        self.head, self.batch = given.head, given.batch
        arguments, real = given.changed(self.batch.gather), self.batch.mask
        if self.batch.is_padded:
            arguments["attention_mask"] = real.long()
            pad_token_id, ids = text_config(call.config).pad_token_id, arguments.get("input_ids")
            if isinstance(pad_token_id, int) and ids is not None:
                # Heads of decoders look for the last token that is no padding token.
                arguments["input_ids"] = ids.masked_fill(~real.to(ids.device), pad_token_id)
            known, filled = recall(call.arguments), torch.from_numpy(self.batch.filled)
            if known:
                remember(arguments["attention_mask"], filled.long())
            if (at := arguments.get("position_ids")) is not None:
                arguments["position_ids"] = _count_on_in_padding(at, real)
                if (host := known.get("position_ids")) is not None:
                    flat = host.expand(*host.shape[:-2], *self.batch.shape).flatten(-2)
                    at = flat[..., torch.from_numpy(self.batch.sources)]
                    remember(arguments["position_ids"], _count_on_in_padding(at, filled))
            for name in given.head.labels if given.head.spans else ():
                if (at := arguments.get(name)) is not None:
                    # At the end of its document, which the loss ignores, it is moved to the batch's
                    # end.
                    ends = upload(self.batch.lengths, at.device).reshape(-1, *[1] * (at.dim() - 1))
                    arguments[name] = at.masked_fill(at >= ends, self.batch.into[1])
        reason = "it declares documents, and its head gives one result per row"
        super().__init__(
            call, reason, None, arguments, Volume.of_layout(given.layout).without_padding()
        )
        self.of_head, self.defers = given.head.name, self.batch.is_padded

    def span_logits(self, output: Any) -> Tensor | None:
        """Return span logits (documents, longest, 2), least at padding; None for others."""
        if not isinstance(output, Tensor) or tuple(output.shape) != (*self.batch.into, 2):
            return None
        return output.masked_fill(
            ~self.batch.mask.to(output.device)[..., None],
            torch.finfo(output.dtype).min,
        )

    @torch._dynamo.disable
    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Raise `UnsupportedModel` if padding may have a part in the output; return None."""
        served = ended.packed_inside and (ended.masked or not self.head.spans)
        if self.batch.is_padded and not served:
            raise UnsupportedModel(
                f"{self.head.name} did not call its backbone, or no module of it gave the logits "
                "of starts and ends, (documents, longest, 2), so padding would have a part in its "
                "results. Run its documents one per row.",
                code="result-per-row",
            )


class PerDocument(CallPlan):
    """Plan that runs packed documents as batches of documents of one length.

    The forward under way gets the first batch; the others are run when it ends. Raises
    `UnsupportedModel` if parameters lie on several ranks, and for labels that leave a document out
    of the loss.
    """

    what = "runs on documents alone, those of one length as a batch"
    packs = True

    def __init__(self, call: Call, given: DocumentArguments, together: bool = True):
        if call.model.groups:
            raise UnsupportedModel(
                f"{given.head.name} runs documents alone, and its parameters lie on several ranks, "
                "all of which would have to run it as often as each other. Pass it padded batches, "
                "one document per row.",
                code="rows-on-ranks",
            )
        self.given = given
        self.groups = (
            by_length(given.batch.lengths)
            if together
            else list(np.arange(given.documents)[:, None])
        )
        """Numbers of the documents of each batch; of one each, unless documents run `together`."""
        # Those of the other batches are counted when they are called.
        first, packed = given.batch.lengths[self.groups[0]], Volume.of_layout(given.layout)
        columns, skipped = int(first.sum()), packed.columns - packed.tokens
        volume = Volume(1, len(first), columns, columns, len(first), skipped)
        if given.left_out:
            raise UnsupportedModel(
                f"{given.left_out[0]} of some document is its length, which leaves it out of the "
                f"loss, and {given.head.name} runs documents alone here and cannot weigh such a "
                "loss. Leave it out of the rows.",
                code="loss-not-of-documents",
            )
        labels, counted = given.arguments.get("labels"), np.ones(given.documents, dtype=bool)
        if labels is not None and not labels.is_floating_point():
            counted = host_values(labels).reshape(given.documents, -1)[:, 0] != IGNORED_LABEL
        self.counts = [int(counted[numbers].sum()) for numbers in self.groups]
        """Number of documents in each batch's mean loss."""
        self.calls = [
            self._arguments_of(*each) for each in zip(self.groups, self.counts, strict=True)
        ]
        self.buffers = Buffers(call.module)
        why = "attention weights are wanted" if call.wants_weights else call.entry.runs_alone
        reason = (
            "it declares documents, and "
            f"{why or 'its head may take another token in a padded batch'}"
        )
        super().__init__(call, reason, None, self.calls[0], volume)

    def _arguments_of(self, numbers: np.ndarray, count: int) -> dict[str, Any]:
        """Return the arguments of a batch of documents `numbers`, `count` of which have labels."""
        layout, documents = self.given.layout, self.given.numbers[numbers]
        batch = TokenMap.of_documents(layout, documents)

        def chosen(value: Tensor) -> Tensor:
            """Return the batch's entries of a value per document."""
            return value.index_select(0, upload(numbers, value.device))

        found = self.given.changed(batch.gather, chosen)
        first = layout.first_positions  # of runs of padding too
        if first is not None and layout.largest_positions is None and not first[documents].any():
            found.pop("position_ids", None)  # alone, the model counts them like that itself
        if not count and found.get("labels") is not None:
            found["labels"] = None  # its mean would be that of nothing
        return {**found, **items_of_share(found, count, sum(self.counts)), "return_dict": True}

    @torch._dynamo.disable
    def finish(self, ended: Activation, module: nn.Module, output: Any) -> Any:
        """Run the other batches; return one output of all documents, in order."""
        outputs = [output]
        # No call of its own for those who count calls.
        with in_force(Scope(self.call.model), self.call.entry.level):
            for call in self.calls[1:]:
                self.buffers.put_back()
                outputs.append(module(**call))
        loss = None
        if any(self.given.arguments.get(name) is not None for name in self.given.head.labels):
            losses = [out.get("loss") for out in outputs]
            loss = mean_loss(losses, self.counts, self.given.layout.device)
        return merged(outputs, self._merge, loss, self.call.wants_tuple)

    def _merge(self, name: str, parts: list[Any]) -> Any:
        """Return field `name` in order of documents from batches' parts; None if shapes differ."""
        axes, batch = AXES.get(name, ()), self.given.batch
        if axes and all(isinstance(part, Tensor) and part.dim() > max(axes) for part in parts):
            fill = (
                torch.finfo(parts[0].dtype).min if name in ("start_logits", "end_logits") else 0.0
            )
            longest = [batch.lengths[numbers].max() for numbers in self.groups]
            # Hidden states of latents are as many for every document (Perceiver).
            own = [
                a for a in axes if all(p.shape[a] == n for p, n in zip(parts, longest, strict=True))
            ]
            for number, part in enumerate(parts):
                shape = [
                    batch.into[1] if axis in own else size for axis, size in enumerate(part.shape)
                ]
                parts[number] = part.new_full(shape, fill)
                parts[number][tuple(map(slice, part.shape))] = part
        return in_order(parts, self.groups)


def _count_on_in_padding(at: Tensor, real: Tensor) -> Tensor:
    """Return positions `at` (..., documents, columns) that count on from the first in padding.

    Where a model hides the mask, positions at padding must not look like another document's.
    """
    counted = at[..., :1] + torch.arange(at.shape[-1], device=at.device)
    return at.where(real.to(at.device), counted)
