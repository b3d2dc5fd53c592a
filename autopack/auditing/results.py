"""What the auditor asks of each kind of head: the results of one document, and labels for a loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.cases import Call, Case
from autopack.inspection import releases
from autopack.inspection.heads import row_head
from autopack.inspection.parameters import parameters_of
from autopack.inspection.source import shifts_labels
from autopack.runtime.marks import handle_of


class OneForAll(Exception):
    """A head gave one result for several documents of a row, so there is none to compare with a document alone."""


def of_rows(output: Any) -> torch.Tensor:
    """The results of each row, as (rows, columns, ...) or, of one result per row, (rows, ...)."""
    if isinstance(getattr(output, "start_logits", None), torch.Tensor):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    for value in (getattr(output, field, None) for field in ("logits", "last_hidden_state")):
        if isinstance(value, torch.Tensor):
            return value
    return output[0]


def of_documents(model: PreTrainedModel, call: Call, output: Any) -> list[torch.Tensor]:
    """The results of each document of a packed call, in the form in which its own row has them when it is alone.

    Raises `OneForAll` where the head has one result per row and gave fewer than there are documents.
    """
    results, head = of_rows(output), row_head(model)
    if head is None or (head.spans and len(results) != len(call.spans)):
        return [results[row, first:end] for row, first, end in call.spans]
    if len(results) != len(call.spans):
        raise OneForAll(f"{head.name} gave {len(results)} results for {len(call.spans)} documents")
    found = dict(zip(_in_order(call), results, strict=True))
    return [found[i][: end - first] if head.spans else found[i] for i, (_, first, end) in enumerate(call.spans)]


def _in_order(call: Call) -> list[int]:
    """Numbers of the documents in the order in which the rows hold them."""
    return sorted(range(len(call.spans)), key=lambda number: call.spans[number])


class Loss(NamedTuple):
    """Labels of a packed call and of each document alone, and how many terms the loss of each alone averages."""

    packed: dict[str, torch.Tensor]
    alone: list[dict[str, torch.Tensor]]
    counts: list[int]


def loss_for(model: PreTrainedModel, case: Case, call: Call) -> Loss | None:
    """Labels that suit the model's head, or None for a head that is not known to have a loss."""
    head = row_head(model)
    if head is not None:
        made = _spans(case, call) if head.spans else _classes(model, case, call)
        packed = {name: value[_in_order(call)] for name, value in made.items()}
        numbers = range(len(call.spans))
        return Loss(packed, [{name: made[name][i : i + 1] for name in made} for i in numbers], [1] * len(numbers))
    if call.source is not None and "labels" not in parameters_of(type(model)).names:
        return None
    targets, skipped = case.inputs(call), 0
    if call.source is not None or type(model).__name__ in releases.causal_lm_class_names():
        # A loss that shifts never uses the first label of a document.
        skipped = int(call.source is None and shifts_labels(model))
        codebooks = model.get_input_embeddings()
        if isinstance(codebooks, nn.ModuleList):  # models of audio codes: (rows, columns, codebooks)
            targets = targets[..., None].expand(-1, -1, len(codebooks))
    elif any(cls.__name__.endswith("ForTokenClassification") for cls in type(model).__mro__):
        targets = targets % (model.config.num_labels or 1)
    else:
        return None
    # Stock, the caller has to mask it, as every collator for packing does; enabled, that is left to autopack.
    masked = skipped if handle_of(model) is None else 0
    labels = torch.full_like(targets, -100)
    for row, first, end in call.spans:
        labels[row, first + masked : end] = targets[row, first + masked : end]
    alone = [{"labels": targets[row, first:end][None]} for row, first, end in call.spans]
    return Loss({"labels": labels}, alone, [end - first - skipped for _, first, end in call.spans])


def _spans(case: Case, call: Call) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([end - first for _, first, end in call.spans], device=case.device)
    return {"start_positions": lengths // 2, "end_positions": lengths - 1}


def _classes(model: PreTrainedModel, case: Case, call: Call) -> dict[str, torch.Tensor]:
    count, kind = model.config.num_labels or 0, getattr(model.config, "problem_type", None)
    numbers = torch.arange(len(call.spans), device=case.device)
    table = numbers[:, None] + torch.arange(count, device=case.device)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if count == 1 or kind == "regression":
        return {"labels": (table.float() / 4).squeeze(1).to(dtype)}
    return {"labels": (table % 2).to(dtype) if kind == "multi_label_classification" else numbers % count}
