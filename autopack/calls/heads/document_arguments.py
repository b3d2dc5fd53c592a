"""The arguments of a packed call for a head with one result per row, whose rows are to be the documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection.heads import RowHead
from autopack.layout.batches import DocumentBatch
from autopack.layout.forms import Frame, Of
from autopack.layout.host import host_values
from autopack.layout.packed import PackedLayout


class DocumentArguments:
    """The arguments of a call, each with what its first dimensions stand for: tokens of rows, or documents."""

    def __init__(self, head: RowHead, arguments: dict[str, Any], layout: PackedLayout):
        self.head = head
        self.arguments = arguments
        self.shape = (layout.rows, layout.columns)
        self.batch = DocumentBatch.without_padding(layout)
        """The documents, in order, as rows."""
        for name in head.labels:
            self._check_labels(name)

    @property
    def documents(self) -> int:
        """Number of documents; padding is none."""
        return len(self.batch.documents)

    def _check_labels(self, name: str) -> None:
        value = self.arguments.get(name)
        if value is None:
            return
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != self.documents:
            raise InvalidPacking(
                f"{name} of {self.head.name} must have one entry per document on packed rows, ({self.documents},) or "
                f"({self.documents}, K); found {found}. The {self.shape[0]} x {self.shape[1]} tokens hold "
                f"{self.documents} documents of {', '.join(map(str, self.batch.lengths[:8]))}"
                f"{', ...' if self.documents > 8 else ''} tokens, in order; padding counts unless attention_mask is 0 "
                f"there."
            )
        if self.head.spans:
            self._check_span(name, value)

    def _check_span(self, name: str, value: torch.Tensor) -> None:
        at = host_values(value.reshape(self.documents, -1)[:, 0])
        wrong = np.flatnonzero((at < 0) | (at > self.batch.lengths))
        if len(wrong):
            raise InvalidPacking(
                f"{name} counts from the start of each document and must lie in 0 ... its length (which stands for no "
                f"answer inside, and is left out of the loss); document {wrong[0]} has "
                f"{self.batch.lengths[wrong[0]]} tokens, found {at[wrong[0]]}. Subtract the document's first column "
                f"from positions in the row."
            )

    def map(
        self, of_token: Callable[[str, torch.Tensor], torch.Tensor], of_document: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        """The arguments with `of_token` applied to (rows, columns, ...) and `of_document` to (documents, ...)."""

        frame = Frame(*self.shape, self.documents, tuple(self.head.labels))

        def change(name: str, value: Any) -> Any:
            form = frame.form_of(name, value)
            if form.of is Of.TOKEN:
                return frame.each(value, form, lambda part: of_token(name, part))
            if form.of is Of.DOCUMENT:
                return of_document(value)
            if form.of is Of.CALL:
                return value
            tensor = isinstance(value, torch.Tensor)
            raise self._no_place(name, f"a tensor of shape {tuple(value.shape)}" if tensor else type(value).__name__)

        return {name: change(name, value) for name, value in self.arguments.items()}

    def _no_place(self, name: str, found: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name} was given to {self.head.name} with packed rows, and autopack cannot tell whose document it is "
            f"of: wanted one value per token {self.shape} or per document ({self.documents}), found {found}. Run such "
            f"documents one per row."
        )
