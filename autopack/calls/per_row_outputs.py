"""Outputs with one result per row, made by a forward itself: towers that pick the state of one token of every row.

A pooler is a module, and its hook hands it the rows of the batch or one document per row. A forward that picks a token
by its own code sees one row of many documents, and what it makes of that is of none of them. That shows in the output:
a tensor with something for each row, and not for each token. Then the padded batch is run as it came, or the documents
alone, and the entry is remembered as one that does so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopack.calls.outputs import parts_of, with_parts
from autopack.errors import UnsupportedModel
from autopack.layout.batches import DocumentBatch, by_length, in_order
from autopack.layout.forms import FIELDS, Field, Frame, Of
from autopack.layout.packed import PackedLayout
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock

REASON = "the forward itself makes one result of every row"


def of_each_row(output: Any, rows: int, columns: int, widths: frozenset[int], most: int = 9) -> list[Any]:
    """The names or places of the tensors of an output that may have a value for each row, as far as shapes can tell.

    `widths` are the sizes of the model's vectors: a tensor (R, C) with such a size may be vectors of rows. Tensors of
    more than `most` dimensions are none, nor is a loss, nor what stands in tuples, which have a part for each layer.
    """

    def may_be(name: Any, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not 0 < value.dim() <= most:
            return False
        if name == "loss" or len(value) != rows or FIELDS.get(name or "", Field(())).rows:
            return False
        # Predictions of the next token are one fewer than columns; vectors may be as many by chance.
        per_token = value.dim() > 1 and value.shape[1] in (columns, columns - 1)
        return not per_token or (value.dim() == 2 and value.shape[1] in widths)

    return [name for name, value in parts_of(output).items() if may_be(name, value)]


def remember(model: EnabledModel, level: int, output: Any, names: list[Any], columns: int) -> None:
    """Note that an entry makes results of rows, unless only a coincidence of sizes made it look so."""
    parts = parts_of(output)
    if any(parts[name].dim() == 1 or parts[name].shape[1] != columns for name in names):
        model.pooling.add(level)


@torch._dynamo.disable
def of_documents(
    model: EnabledModel,
    module: nn.Module,
    arguments: dict[str, Any],
    layout: PackedLayout,
    output: Any,
    names: list[Any],
) -> Any:
    """The output of packed rows with what the model makes of each document alone in the places of `names`.

    Documents of one length share a batch. Raises `UnsupportedModel` where that may not be told from the call.
    """
    if parts_of(output).get("loss") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} makes a loss and one result of every row, and the loss may be one of them. "
            f"Compute it from the outputs, or run the documents one per row.",
            code="result-per-row",
        )
    whole = DocumentBatch.without_padding(layout)
    groups = by_length(whole.lengths)
    batches = [DocumentBatch.of(layout, whole.documents[group]) for group in groups]
    runs = []
    for batch in batches:
        given = {name: _spread(module, name, value, batch) for name, value in arguments.items()}
        with stock(model):
            runs.append(parts_of(module.forward(**given)))
    changed = {}
    for name in names:
        parts: list[Any] = [run.get(name) for run in runs]
        if all(batch.holds(part) for batch, part in zip(batches, parts, strict=True)):
            continue  # it has a value for each token after all
        alike = {part.shape[1:] if isinstance(part, torch.Tensor) else None for part in parts}
        counts = [len(part) if isinstance(part, torch.Tensor) else 0 for part in parts]
        if len(alike) != 1 or counts != [len(group) for group in groups]:
            raise UnsupportedModel(
                f"{type(module).__name__} gives {name or 'its output'} of shapes that differ by document, "
                f"and not for each token, so autopack cannot tell what of it is of which document of a packed row. "
                f"Run the documents one per row.",
                code="output-unknown",
            )
        changed[name] = in_order(parts, groups)
    return with_parts(output, changed)


def _spread(module: nn.Module, name: str, value: Any, batch: DocumentBatch) -> Any:
    """An argument of a packed row as that of documents as rows."""
    layout = batch.layout
    frame = Frame(layout.rows, layout.columns, shared=True)
    form = frame.form_of(name, value)
    if form.of is Of.TOKEN:
        return frame.each(value, form, batch.spread)
    if form.of is Of.CALL:
        return value
    raise UnsupportedModel(
        f"{type(module).__name__} makes one result of every row, so its documents are run alone, and autopack does not "
        f"know what of {name} belongs to which document. Leave it out, or run the documents one per row.",
        code="argument-of-no-document",
    )
