"""Packed rows for heads with one result per row: the call becomes one whose rows are the documents.

Most heads get the documents as a right-padded batch; the backbone inside runs the real tokens as one packed row and
hands the head the padded states, as it does for any padded batch. Where that cannot be the same as each document
alone, the whole model runs on documents of one length at a time, with no padding at all, and the results are put
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopack.calls.unpadded import has_tensors, replaced_by
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import heads
from autopack.inspection.poolers import activation_of, pools_single_tokens
from autopack.layout.declarations import IGNORED_LABEL
from autopack.runtime.scope import current

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autopack.calls.hooks import EntryHook
    from autopack.layout.packed import PackedLayout
    from autopack.runtime.model import Enabled
from autopack.layout.batches import DocumentRows

_OWN_TOKENS = {"logits": (), "start_logits": (1,), "end_logits": (1,), "hidden_states": (1,), "attentions": (2, 3)}
"""Outputs of documents of one length, and their dimensions that are as long as the document."""


class _Call:
    """The arguments of a packed call, each with what its first dimensions stand for."""

    def __init__(self, head: heads.RowHead, arguments: dict[str, Any], layout: PackedLayout):
        self.head = head
        self.arguments = arguments
        self.shape = (layout.rows, layout.columns)
        self.rows = DocumentRows.of(layout)
        self.starts, self.lengths = self.rows.starts, self.rows.lengths
        for name in head.labels:
            self._check_labels(name)

    @property
    def documents(self) -> int:
        """Number of documents; padding is none."""
        return len(self.starts)

    def _check_labels(self, name: str) -> None:
        value = self.arguments.get(name)
        if value is None:
            return
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != self.documents:
            raise InvalidPacking(
                f"{name} of {self.head.name} must have one entry per document on packed rows, ({self.documents},) or "
                f"({self.documents}, K); found {found}. The {self.shape[0]} x {self.shape[1]} tokens hold "
                f"{self.documents} documents of {', '.join(map(str, self.lengths[:8]))}"
                f"{', ...' if self.documents > 8 else ''} tokens, in order; padding counts unless attention_mask is 0 "
                f"there."
            )
        if self.head.spans:
            self._check_span(name, value)

    def _check_span(self, name: str, value: torch.Tensor) -> None:
        at = value.detach().reshape(self.documents, -1)[:, 0].cpu().numpy()
        wrong = (at < 0) | (at > self.lengths)
        if wrong.any():
            number = int(np.flatnonzero(wrong)[0])
            raise InvalidPacking(
                f"{name} counts from the start of each document and must lie in 0 ... its length (which stands for no "
                f"answer inside, and is left out of the loss); document {number} has {self.lengths[number]} tokens, "
                f"found {at[number]}. Subtract the document's first column from positions in the row."
            )

    def map(self, of_token: Any, of_document: Any) -> dict[str, Any]:
        """The arguments with `of_token` applied to (rows, columns, ...) and `of_document` to (documents, ...)."""

        def change(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                if has_tensors(value):
                    raise self._no_place(name, type(value).__name__)
                return value
            if name == "position_ids" and value.dim() >= 2:
                value = value.expand(*value.shape[:-2], *self.shape)
                return of_token(name, value) if value.dim() == 2 else torch.stack([of_token(name, v) for v in value])
            if name not in self.head.labels and tuple(value.shape[:2]) == self.shape:
                return of_token(name, value)
            if value.dim() and len(value) == self.documents:
                return of_document(value)
            if value.numel() == 1:
                return value
            raise self._no_place(name, f"a tensor of shape {tuple(value.shape)}")

        return {name: change(name, value) for name, value in self.arguments.items()}

    def _no_place(self, name: str, found: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name} was given to {self.head.name} with packed rows, and autopack cannot tell whose document it is "
            f"of: wanted one value per token {self.shape} or per document ({self.documents}), found {found}. Run such "
            f"documents one per row."
        )


class PaddedDocuments:
    """The documents of a packed call as a right-padded batch, whose backbone is to run without the padding."""

    def __init__(self, call: _Call, level: int, module: PreTrainedModel):
        self.level = level
        self.name = call.head.name
        self.spans = call.head.spans
        self.rows = call.rows
        self.unpadded = False
        """Whether the backbone has run without the padding."""
        self.masked = False
        """Whether the head's logits of starts and ends at padding have been taken out."""
        self.arguments = call.map(self._spread, lambda value: value)
        if not self.rows.is_padded:
            return
        self.arguments["attention_mask"] = self.rows.real.long()
        pad_token_id, ids = module.config.get_text_config().pad_token_id, self.arguments.get("input_ids")
        if isinstance(pad_token_id, int) and ids is not None:
            # Heads of decoders look for the last token that is no padding token.
            self.arguments["input_ids"] = ids.masked_fill(~self.rows.real.to(ids.device), pad_token_id)
        for name in call.head.labels if self.spans else ():
            self.arguments[name] = self._left_out(self.arguments.get(name))

    def _spread(self, name: str, value: torch.Tensor) -> torch.Tensor:
        batch = self.rows.spread(value)
        if name != "position_ids":
            return batch
        # Counted on in padding: where a model hides the mask, they must not look like those of another document.
        columns = torch.arange(batch.shape[1], device=batch.device)
        return batch.where(self.rows.real.to(batch.device), batch[:, :1] + columns)

    @property
    def waits(self) -> bool:
        """Whether an entry further in has padding to take out."""
        return self.rows.is_padded

    def _left_out(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        """A position at the end of its document is ignored by the loss, and so must be at the end of the batch."""
        if positions is None:
            return None
        lengths = self.rows.real.sum(1).to(positions.device).reshape(-1, *[1] * (positions.dim() - 1))
        return positions.masked_fill(positions >= lengths, self.rows.padding.columns)

    def mask(self, output: Any) -> torch.Tensor | None:
        """Logits of starts and ends (documents, longest, 2), the least of their dtype at padding; None for all else."""
        wanted = (*self.rows.padding.shape, 2)
        if not self.rows.is_padded or not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
            return None
        self.masked = True
        return output.masked_fill(~self.rows.real.to(output.device)[..., None], torch.finfo(output.dtype).min)

    @torch._dynamo.disable
    def finish(self, module: PreTrainedModel, output: Any) -> Any:
        """Raise `UnsupportedModel` where padding may have had a part in the output."""
        if self.waits and not self.unpadded:
            raise UnsupportedModel(
                f"{self.name} did not call its backbone, so the documents of packed rows were run with padding. Run "
                f"them one per row."
            )
        if self.waits and self.spans and not self.masked:
            raise UnsupportedModel(
                f"no module of {self.name} gave the logits of starts and ends, (documents, longest, 2), so padding "
                f"would have a part in its loss. Run its documents one per row."
            )
        return None


class SpanLogitsHook:
    """Forward hook of the parts of a question answering head: logits at padding become the least of their dtype.

    It holds nothing, since PEFT copies the heads that it trains.
    """

    # Traced, it is left out of a graph for other lengths (torch 2.13), and padding would count.
    @torch._dynamo.disable
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        scope = current()
        documents = None if scope is None else scope.documents
        return documents.mask(output) if isinstance(documents, PaddedDocuments) else None


class DocumentsAlone:
    """The documents of a packed call as batches of documents of one length.

    The forward under way gets the first batch; the others are run when it ends.
    """

    waits = False
    unpadded = True

    def __init__(self, call: _Call, level: int, module: PreTrainedModel):
        self.level = level
        self.name = call.head.name
        self.call = call
        self.longest = int(call.lengths.max())
        self.groups = [np.flatnonzero(call.lengths == length) for length in np.unique(call.lengths)]
        told = call.arguments.get("return_dict")
        self.wants_tuple = not (module.config.return_dict if told is None else told)
        self._check_ignored()
        self.calls = [self._of_group(numbers) for numbers in self.groups]
        self.arguments = self.calls[0]

    def _check_ignored(self) -> None:
        for name in self.call.head.labels if self.call.head.spans else ():
            value = self.call.arguments.get(name)
            if value is not None and (value.detach().reshape(-1).cpu().numpy() == self.call.lengths).any():
                raise UnsupportedModel(
                    f"{name} of some document is its length, which leaves it out of the loss, and "
                    f"{self.call.head.name} runs documents alone here and cannot weigh such a loss. Leave it out of "
                    f"the rows."
                )

    def _of_group(self, numbers: np.ndarray) -> dict[str, Any]:
        length = self.call.lengths[numbers[0]]
        where = torch.from_numpy(self.call.starts[numbers][:, None] + np.arange(length))
        index = torch.from_numpy(numbers)
        found = self.call.map(
            lambda name, value: value.reshape(-1, *value.shape[2:])[where.to(value.device)],
            lambda value: value.index_select(0, index.to(value.device)),
        )
        labels = found.get("labels")
        if labels is not None and not self._compared(labels):
            found["labels"] = None  # its mean would be that of nothing
        found.pop("num_items_in_batch", None)  # the means of all batches are put together here
        return {**found, "return_dict": True}

    @staticmethod
    def _compared(labels: torch.Tensor) -> int:
        """Number of documents whose label counts in the loss."""
        return (
            len(labels)
            if labels.is_floating_point()
            else int((labels.reshape(len(labels), -1)[:, 0] != IGNORED_LABEL).sum())
        )

    @torch._dynamo.disable
    def finish(self, module: PreTrainedModel, output: Any) -> Any:
        """Run what is left, and the output of all documents in order."""
        outputs = [output, *(module(**call) for call in self.calls[1:])]
        merged = {name: self._merge(name, [out.get(name) for out in outputs]) for name in output if name != "loss"}
        losses = [out.get("loss") for out in outputs]
        if any(self.call.arguments.get(name) is not None for name in self.call.head.labels):
            merged["loss"] = self._loss(losses)
        whole = type(output)(**{name: value for name, value in merged.items() if value is not None})
        return whole.to_tuple() if self.wants_tuple else whole

    def _merge(self, name: str, parts: list[Any]) -> Any:
        if isinstance(parts[0], (tuple, list)):
            return tuple(self._merge(name, list(each)) for each in zip(*parts, strict=True))
        groups = zip(parts, self.groups, strict=True)
        if not all(isinstance(part, torch.Tensor) and len(part) == len(numbers) for part, numbers in groups):
            return None
        fill = torch.finfo(parts[0].dtype).min if name in ("start_logits", "end_logits") else 0.0
        wide = [_widened(part, _OWN_TOKENS.get(name, ()), self.longest, fill) for part in parts]
        if len({part.shape[1:] for part in wide}) > 1:
            return None
        order = np.argsort(np.concatenate(self.groups), kind="stable")
        return torch.cat(wide).index_select(0, torch.from_numpy(order).to(wide[0].device))

    def _loss(self, losses: list[torch.Tensor | None]) -> torch.Tensor:
        """The mean over documents; every loss is one over those of its batch."""
        counts = [
            len(numbers) if call.get("labels") is None else self._compared(call["labels"])
            for call, numbers in zip(self.calls, self.groups, strict=True)
        ]
        known = [(loss, count) for loss, count in zip(losses, counts, strict=True) if loss is not None]
        if not known:
            return torch.full((), torch.nan, device=self.call.rows.real.device)  # what a mean over no label gives
        total = sum(count for _, count in known)
        return torch.stack([loss * (count / total) for loss, count in known]).sum()


def _widened(part: torch.Tensor, dimensions: tuple[int, ...], longest: int, fill: float) -> torch.Tensor:
    for dimension in dimensions:
        shape = list(part.shape)
        shape[dimension] = longest - shape[dimension]
        part = torch.cat([part, part.new_full(shape, fill)], dim=dimension)
    return part


def why_alone(enabled: Enabled, level: int) -> str | None:
    """Why the documents of packed rows have to be run alone by this head, whatever the call; None where they have not.

    Such a head reads padding although a mask says where it lies, or its backbone cannot run without the padding.
    """
    model, inner = enabled.entries[level], enabled.entries[level + 1 :]
    if enabled.one_by_one is not None:
        return enabled.one_by_one
    if not inner:
        return "it holds no backbone that takes tokens"
    if any(pools_single_tokens(entry) and activation_of(entry) is None for entry in inner):
        return "its pooler is handed one token of every row"
    return heads.reads_whole_row(model)


def spread(
    hook: EntryHook, module: PreTrainedModel, arguments: dict[str, Any], layout: PackedLayout, wants_weights: bool
) -> PaddedDocuments | DocumentsAlone:
    """What a call of a row head with packed rows is run as; `arguments` are without declarations and caches.

    Raises `InvalidPacking` for labels that are not per document, and `UnsupportedModel` for what cannot be told apart.
    """
    assert hook.head is not None
    call = _Call(hook.head, arguments, layout)
    if heads.looks_for_padding(module) and module.config.get_text_config().pad_token_id is None:
        raise UnsupportedModel(
            f"{hook.head.name} finds the last token of each of several rows by config.pad_token_id, which is None. Set "
            f"model.config.pad_token_id to a token that no document ends with, as for padded batches."
        )
    alone = wants_weights or hook.runs_alone is not None or _ends_elsewhere(module, call)
    alone = alone or any(replaced_by(entry) is not None for entry in hook.enabled.entries[hook.level + 1 :])
    return (DocumentsAlone if alone else PaddedDocuments)(call, hook.level, module)


def _ends_elsewhere(module: PreTrainedModel, call: _Call) -> bool:
    """Whether a head that looks for padding would find another token in a padded batch than in a document alone."""
    ids = call.arguments.get("input_ids")
    if ids is None:
        return heads.looks_for_padding(module)  # it takes the last column of embeddings
    if not heads.takes_first_padding(module):
        return False
    first = ids.reshape(-1)[torch.from_numpy(call.starts).to(ids.device)]
    return bool((first == module.config.get_text_config().pad_token_id).any())
