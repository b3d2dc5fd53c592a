"""The documents of packed rows run alone through a whole head, those of one length as a batch.

Where a model heeds masks in all that it does, they are one padded batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.calls.call import Call
from autopack.calls.heads.document_arguments import DocumentArguments
from autopack.calls.lockstep import idle_outputs, running_again, steps_of
from autopack.calls.plan import Plan
from autopack.errors import UnsupportedModel
from autopack.layout import IGNORED_LABEL
from autopack.layout.batches import DocumentBatch, by_length, items_of_share, mean_loss
from autopack.layout.forms import FIELDS, Field
from autopack.layout.host import host_values, recall
from autopack.runtime.runs import Buffers, with_idle
from autopack.runtime.scope import Scope
from autopack.runtime.tally import Volume


class DocumentsAlone(Plan):
    """The documents of a packed call as batches of documents of one length.

    The forward under way gets the first batch; the others are run when it ends.
    """

    what = "runs on documents alone, those of one length as a batch"
    packs = True

    def __init__(self, call: Call, given: DocumentArguments, together: bool = True):
        super().__init__(Scope(call.model))
        self.given = given
        why = "attention weights are wanted" if call.wants_weights else call.entry.runs_alone
        self.reason = f"it declares documents, and {why or 'its head may take another token in a padded batch'}"
        self.groups: list[np.ndarray]
        """Numbers of the documents of each batch; of one, where documents are not run `together`."""
        if not together:
            self.groups = list(np.arange(given.documents)[:, None])
        elif self._as_one_batch(call):
            self.groups, self.what = [np.arange(given.documents)], "runs on documents alone, as a padded batch"
        else:
            self.groups = by_length(given.batch.lengths)
        # Those of the other batches are counted when they are called.
        first, packed = given.batch.lengths[self.groups[0]], Volume.of_layout(given.batch.layout)
        columns, skipped = int(first.sum()), packed.columns - packed.tokens
        self.volume = Volume(1, len(first), columns, columns, len(first), skipped)
        self.wants_tuple = call.wants_tuple
        self._check_ignored()
        counted = _counted(given.arguments.get("labels"), given.documents)
        self.counts = [int(counted[numbers].sum()) for numbers in self.groups]
        """How many documents of each batch its loss is the mean over."""
        self.calls = [self._of_group(*each) for each in zip(self.groups, self.counts, strict=True)]
        for each, count in zip(self.calls, self.counts, strict=True):
            each |= items_of_share(each, count, sum(self.counts))
        self.arguments = self.calls[0]
        self.buffers = Buffers(call.module)

    @staticmethod
    def _as_one_batch(call: Call) -> bool:
        """Whether padding changes nothing: somebody's forward may read it, and weights have a column for each token."""
        return call.model.traits.heeds_masks and not call.wants_weights and call.entry.foreign is None

    def _check_ignored(self) -> None:
        head, lengths = self.given.head, self.given.batch.lengths
        for name in head.labels if head.spans else ():
            value = self.given.arguments.get(name)
            if value is not None and (host_values(value).reshape(-1) == lengths).any():
                raise UnsupportedModel(
                    f"{name} of some document is its length, which leaves it out of the loss, and "
                    f"{head.name} runs documents alone here and cannot weigh such a loss. Leave it out of the rows."
                )

    def _of_group(self, numbers: np.ndarray, count: int) -> dict[str, Any]:
        whole = self.given.batch
        batch = DocumentBatch.of(whole.layout, whole.documents[numbers])
        index = torch.from_numpy(numbers)
        found = self.given.map(
            lambda name, value: batch.spread(value), lambda value: value.index_select(0, index.to(value.device))
        )
        first = whole.layout.first_positions  # of runs of padding too
        counted = first is not None and whole.layout.largest_positions is None and not first[whole.documents].any()
        if self.scope.model.traits.numbers_itself and counted:
            found.pop("position_ids", None)
        if batch.is_padded:
            found["attention_mask"] = batch.mask.long()
        if not count and found.get("labels") is not None:
            # Its mean would be that of nothing. In step with other ranks its loss is in the graph all the same.
            found["labels"] = torch.zeros_like(found["labels"]) if self.scope.model.groups else None
        return {**found, "return_dict": True}

    @torch._dynamo.disable
    def finish(self, module: nn.Module, output: Any) -> Any:
        """Run what is left, and put the outputs of all documents in order."""
        steps = steps_of(self.call)
        if steps is None and self.call.model.groups:
            raise UnsupportedModel(
                f"{self.given.head.name} runs documents alone and is called by another model here, whose parameters "
                f"lie on several ranks with other numbers of documents. Pass it padded batches, one document per row."
            )
        outputs = [output]
        with running_again(self.call):
            for call in self.calls[1:]:
                self.buffers.put_back()
                if steps is not None:
                    steps.begin()
                outputs.append(module(**call))
            idle = [] if steps is None else idle_outputs(self.call, module, steps, self.calls[-1])
        merged = {name: self._merge(name, [out.get(name) for out in outputs]) for name in output if name != "loss"}
        if any(self.given.arguments.get(name) is not None for name in self.given.head.labels):
            losses = [out.get("loss") for out in outputs]
            loss = mean_loss(losses, self.counts, self.given.batch.where.device)
            merged["loss"] = with_idle(loss, [each for each, n in zip(losses, self.counts, strict=True) if not n])
        merged = with_idle(merged, [{**each} for each in idle])
        whole = type(output)(**{name: value for name, value in merged.items() if value is not None})
        return whole.to_tuple() if self.wants_tuple else whole

    def _merge(self, name: str, parts: list[Any]) -> Any:
        if isinstance(parts[0], (tuple, list)):
            return tuple(self._merge(name, list(each)) for each in zip(*parts, strict=True))
        field = FIELDS.get(name, Field(()))
        parts = [p.movedim(field.rows, 0) if isinstance(p, torch.Tensor) and p.dim() > field.rows else p for p in parts]
        groups = zip(parts, self.groups, strict=True)
        if not all(isinstance(part, torch.Tensor) and len(part) == len(numbers) for part, numbers in groups):
            return None
        fill = torch.finfo(parts[0].dtype).min if name in ("start_logits", "end_logits") else 0.0
        longest = self.given.batch.shape[1]
        lengths = [self.given.batch.lengths[numbers].max() for numbers in self.groups]
        # Hidden states of latents are as many for every document (Perceiver).
        own = [
            axis
            for axis in field.tokens
            if all(part.shape[axis] == length for part, length in zip(parts, lengths, strict=True))
        ]
        wide = [_widened(part, own, longest, fill) for part in parts]
        if len({part.shape[1:] for part in wide}) > 1:
            return None
        order = np.argsort(np.concatenate(self.groups), kind="stable")
        whole = torch.cat(wide).index_select(0, torch.from_numpy(order).to(wide[0].device))
        return whole.movedim(0, field.rows)


def _counted(labels: torch.Tensor | None, documents: int) -> np.ndarray:
    """Which documents have a label that counts in the loss, (documents,) on the host; all where none are given."""
    if labels is None or labels.is_floating_point():
        return np.ones(documents, dtype=bool)
    known = recall({"labels": labels}).get("labels", labels)
    return host_values(known.reshape(documents, -1)[:, 0]) != IGNORED_LABEL


def _widened(part: torch.Tensor, dimensions: list[int], longest: int, fill: float) -> torch.Tensor:
    for dimension in dimensions:
        shape = list(part.shape)
        shape[dimension] = longest - shape[dimension]
        part = torch.cat([part, part.new_full(shape, fill)], dim=dimension)
    return part
