"""The last resort: the whole model on documents alone, for models in which nothing smaller keeps them apart.

Documents of one length share a batch, so nothing is padded. It costs what stock costs with these documents, sorted by
length; what packing gains elsewhere, fewer and fuller calls, it does not gain here.
"""

from __future__ import annotations

from typing import Any

import torch

from autopack.errors import UnsupportedModel
from autopack.family import MixerCall
from autopack.inspection.source import shifts_labels
from autopack.layout import IGNORED_LABEL
from autopack.layout.batches import DocumentBatch, equally_long_documents, items_of_share, mean_loss
from autopack.layout.forms import Frame, Of
from autopack.layout.host import host_values
from autopack.mixers.own_attention import STATES, pairs_of
from autopack.runtime.lockstep import with_idle
from autopack.runtime.scope import running_scope, without_layout


def run_documents_alone(call: MixerCall, numbers_itself: bool = False) -> Any:
    """Run a model, or one half of an encoder-decoder, on the documents of packed rows as if each were alone.

    What its output has for every token (rows, columns, ...) comes back as for packed rows, the loss as the mean over
    the labels of all documents (or, where the model's loss counts so, their sum over `num_items_in_batch`); what it has
    otherwise is left out. With `numbers_itself`, positions that count from 0 are not handed on.
    """
    layout = call.layout
    frame = Frame(layout.rows, layout.columns)
    found, read = pairs_of(layout, call.memory, equally_long_documents)
    wants_tuple = call.arguments.get("return_dict") is False

    def spread(name: str, value: Any, batch: DocumentBatch, memory: DocumentBatch | None) -> Any:
        if memory is not None and name in STATES:
            return memory.spread(value)
        form = frame.form_of(name, value)
        return frame.each(value, form, batch.spread) if form.of is Of.TOKEN else value

    pairs = zip(found.batches, read, strict=True)
    every = [{name: spread(name, value, *pair) for name, value in call.arguments.items()} for pair in pairs]
    counts = _compared(call.mixer, [given.get("labels") for given in every])
    scope = running_scope()
    in_step = scope is not None and scope.in_step
    outputs = []
    for given, count in zip(every, counts, strict=True):
        if numbers_itself and _count_from_zero(given.get("position_ids")):
            given["position_ids"] = None
        if not count and given.get("labels") is not None:
            # Its mean would be that of nothing. In step with others its loss is in the graph all the same.
            given["labels"] = torch.zeros_like(given["labels"]) if in_step else None
        given |= items_of_share(given, count, sum(counts))
        with without_layout():
            outputs.append(call.original(call.mixer, **{**given, "return_dict": True}))
        if any(outputs[-1].get(name) is not None for name in ("aux_loss", "router_logits")):
            raise UnsupportedModel(
                f"{type(call.mixer).__name__} runs the documents of packed rows one after another, and the loss of its "
                f"routers is not the mean of theirs. Set output_router_logits=False, or pass padded batches."
            )
    merged = {
        name: found.together([output.get(name) for output in outputs], lambda parts: None, name)
        for name in outputs[0]
        if name != "loss"
    }
    if call.arguments.get("labels") is not None:
        losses = [output.get("loss") for output in outputs]
        loss = mean_loss(losses, counts, layout.device)
        merged = {"loss": with_idle(loss, [each for each, n in zip(losses, counts, strict=True) if not n]), **merged}
    whole = type(outputs[0])(**merged)
    return whole.to_tuple() if wants_tuple else whole


def _count_from_zero(positions: Any) -> bool:
    if not isinstance(positions, torch.Tensor):
        return False
    return torch.equal(positions, torch.arange(positions.shape[-1], device=positions.device).expand_as(positions))


def _compared(model: Any, labels: list[torch.Tensor | None]) -> list[int]:
    """How many labels of each batch the model's own loss compares with a prediction; one copy to the host for all."""
    given = [each for each in labels if each is not None]
    if len(given) < len(labels):
        return [0] * len(labels)
    seen = [each[:, 1:] if shifts_labels(model) else each for each in given]
    return host_values(torch.stack([(each != IGNORED_LABEL).sum() for each in seen])).tolist()
