"""Outputs with one result per row by a forward itself: towers that pick one token's state.

A pooler is a module, and its hook hands it the rows of the batch or one document per row. A forward
that picks a token by its own code sees one row of many documents, and its result belongs to none of
them. That shows in the output: a tensor has values per row, and not per token. Then the padded
batch is run as it came, or the documents alone, and the entry is remembered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from autopack.calls.outputs import parts_of, with_parts
from autopack.errors import UnsupportedModel
from autopack.layout.forms import FIELDS, Field, Frame, Of
from autopack.layout.packed import PackedLayout, real_documents
from autopack.layout.token_map import TokenMap, by_length, in_order
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock

REASON = "the forward itself makes one result of every row"


def of_each_row(output: Any, rows: int, columns: int, widths: frozenset[int], most: int = 9) -> list[Any]:
    """Return the names or places of output tensors that may have a value per row, by shape.

    `widths` are the sizes of the model's vectors: a tensor (R, C) with such a size may be vectors
    of rows. Tensors with more than `most` dimensions do not count, nor do a loss and the parts of
    tuples, which have one for each layer.
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
    """Note that an entry makes results per row, unless sizes coincide by chance."""
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
    """Return packed rows' output, with the model's results for each document alone at `names`.

    Documents of one length share a batch. Raises `UnsupportedModel` if the call does not allow
    that.
    """
    if parts_of(output).get("loss") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} makes a loss and one result of every row, and the loss may be one of them. "
            f"Compute it from the outputs, or run the documents one per row.",
            code="result-per-row",
        )
    documents = np.flatnonzero(real_documents(layout))
    groups = by_length(np.diff(layout.bounds)[documents])
    batches = [TokenMap.of_documents(layout, documents[group]) for group in groups]
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


def _spread(module: nn.Module, name: str, value: Any, batch: TokenMap) -> Any:
    """Return an argument of a packed row in the form with documents as rows."""
    frame = Frame(*batch.shape, shared=True)
    form = frame.form_of(name, value)
    if form.of is Of.TOKEN:
        return frame.each(value, form, batch.gather)
    if form.of is Of.CALL:
        return value
    raise UnsupportedModel(
        f"{type(module).__name__} makes one result of every row, so its documents are run alone, and autopack does not "
        f"know what of {name} belongs to which document. Leave it out, or run the documents one per row.",
        code="argument-of-no-document",
    )
