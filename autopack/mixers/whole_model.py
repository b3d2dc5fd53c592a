"""The last resort: the whole model on documents alone, for models in which nothing smaller keeps them apart.

Documents of one length share a batch, so nothing is padded. It costs what stock costs with these documents, sorted by
length; what packing gains elsewhere, fewer and fuller calls, it does not gain here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autopack.family import MixerCall
from autopack.layout.batches import Piece, equally_long, pieces, together
from autopack.runtime.scope import without_layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["run_documents_alone"]

_IGNORED_LABEL = -100


def run_documents_alone(call: MixerCall) -> Any:
    """Run a model on the documents of packed rows as if each were alone.

    What its output has for every token (rows, columns, ...) comes back as for packed rows, the loss as the mean over
    the labels of all documents (or their sum over `num_items_in_batch`); what it has otherwise is left out.
    """
    layout = call.layout
    found, back = pieces(layout, equally_long)
    wants_tuple = call.arguments.get("return_dict") is False

    def spread(value: Any, piece: Piece) -> Any:
        of_tokens = isinstance(value, torch.Tensor) and value.shape[:2] == (layout.rows, layout.columns)
        return piece.spread(value) if of_tokens else value

    outputs, counts = [], []
    for piece in found:
        given = {name: spread(value, piece) for name, value in call.arguments.items()}
        labels = given.get("labels")
        counts.append(0 if labels is None else _compared(call.mixer, labels))
        if labels is not None and not counts[-1]:
            given["labels"] = None  # its mean would be that of nothing
        with without_layout():
            outputs.append(call.original(call.mixer, **{**given, "return_dict": True}))
    parts = [{name: value for name, value in output.items() if name != "loss"} for output in outputs]
    merged = {name: _merge(call, found, back, [part.get(name) for part in parts]) for name in parts[0]}
    if call.arguments.get("labels") is not None:
        merged = {"loss": _loss(call, [output.get("loss") for output in outputs], counts), **merged}
    whole = type(outputs[0])(**merged)
    return whole.to_tuple() if wants_tuple else whole


def _merge(call: MixerCall, found: list[Piece], back: torch.Tensor, parts: list[Any]) -> Any:
    if isinstance(parts[0], (tuple, list)):  # hidden states of all layers
        return tuple(_merge(call, found, back, list(each)) for each in zip(*parts, strict=True))
    of_tokens = all(piece.holds(part) for piece, part in zip(found, parts, strict=True))
    return together(call.layout, found, back, parts) if of_tokens else None


def _compared(model: Any, labels: torch.Tensor) -> int:
    """How many labels the model's own loss compares with a prediction."""
    from autopack.inspection.source import shifts_labels

    of_model: PreTrainedModel = model
    seen = labels[:, 1:] if shifts_labels(of_model) else labels
    return int((seen != _IGNORED_LABEL).sum())


def _loss(call: MixerCall, losses: list[Any], counts: list[int]) -> torch.Tensor | None:
    known = [(loss, count) for loss, count in zip(losses, counts, strict=True) if loss is not None]
    if not known:
        return torch.zeros((), device=call.layout.device) / 0.0  # what a mean over no label gives
    if call.arguments.get("num_items_in_batch") is not None:
        return torch.stack([loss for loss, _ in known]).sum()
    weights = torch.tensor([count for _, count in known], device=known[0][0].device, dtype=torch.float64)
    shares = (weights / weights.sum()).to(known[0][0].dtype)
    return (torch.stack([loss for loss, _ in known]) * shares).sum()
