"""What the auditor asks of each kind of head: the results of one document, and labels for a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.cases import AnyCase, Call
from autopack.inspection import releases
from autopack.inspection.heads import row_head
from autopack.inspection.source import shifts_labels
from autopack.runtime.marks import handle_of


class OneForAll(Exception):
    """A head gave one result for several documents of a row, so there is none to compare with a document alone."""


def of_document(model: PreTrainedModel, output: Any) -> torch.Tensor:
    """The results of one document that was run by itself, as (tokens, ...) or, of one result per row, (...)."""
    return _results(output)[0]


def of_documents(model: PreTrainedModel, call: Call, output: Any) -> list[torch.Tensor]:
    """The results of each document of a packed call, in the form of `of_document`.

    Raises `OneForAll` where the head has one result per row and gave fewer than there are documents.
    """
    results, head = _results(output), row_head(model)
    if head is None or (head.spans and len(results) != len(call.spans)):
        return [results[row, first:end] for row, first, end in call.spans]
    if len(results) != len(call.spans):
        raise OneForAll(f"{head.name} gave {len(results)} results for {len(call.spans)} documents")
    found: list[torch.Tensor] = [results[0]] * len(results)
    for result, number in zip(results, _in_order(call), strict=True):
        _, first, end = call.spans[number]
        found[number] = result[: end - first] if head.spans else result
    return found


def _in_order(call: Call) -> list[int]:
    """Numbers of the documents in the order in which the rows hold them."""
    return sorted(range(len(call.spans)), key=lambda number: call.spans[number])


def _results(output: Any) -> torch.Tensor:
    if isinstance(getattr(output, "start_logits", None), torch.Tensor):
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    for field in ("logits", "last_hidden_state"):
        value = getattr(output, field, None)
        if isinstance(value, torch.Tensor):
            return value
    return output[0]


@dataclass(frozen=True)
class Loss:
    """A loss for the documents of a call.

    `packed` are the labels of the packed call, `alone(i)` those of document i; `counts` says how many terms the loss of
    each document alone is the mean of.
    """

    packed: dict[str, torch.Tensor]
    alone: Callable[[int], dict[str, torch.Tensor]]
    counts: list[int]


def loss_for(model: PreTrainedModel, case: AnyCase, call: Call) -> Loss | None:
    """Labels that suit the model's head, or None for a head that is not known to have a loss."""
    head = row_head(model)
    if head is not None:
        made = _spans(case, call) if head.spans else _classes(model, case, call)
        packed = {name: value[_in_order(call)] for name, value in made.items()}
        return Loss(packed, lambda i: {name: value[i : i + 1] for name, value in made.items()}, [1] * len(call.spans))
    if call.source is not None and "labels" not in inspect.signature(model.forward).parameters:
        return None
    if call.source is not None or type(model).__name__ in releases.causal_lm_class_names():
        return _next_tokens(model, case, call)
    if any(cls.__name__.endswith("ForTokenClassification") for cls in type(model).__mro__):
        return _token_classes(model, case, call)
    return None


def _spans(case: AnyCase, call: Call) -> dict[str, torch.Tensor]:
    middle = [(end - first) // 2 for _, first, end in call.spans]
    last = [end - first - 1 for _, first, end in call.spans]
    return {
        "start_positions": torch.tensor(middle, device=case.device),
        "end_positions": torch.tensor(last, device=case.device),
    }


def _classes(model: PreTrainedModel, case: AnyCase, call: Call) -> dict[str, torch.Tensor]:
    count, kind = model.config.num_labels or 0, getattr(model.config, "problem_type", None)
    numbers = torch.arange(len(call.spans), device=case.device)
    if count == 1 or kind == "regression":
        targets = (numbers[:, None] + torch.arange(count, device=case.device)).float() / 4
        labels = targets[:, 0] if count == 1 else targets
    elif kind == "multi_label_classification":
        labels = ((numbers[:, None] + torch.arange(count, device=case.device)) % 2).float()
    else:
        labels = numbers % count
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {"labels": labels.to(dtype) if labels.is_floating_point() else labels}


def _token_classes(model: PreTrainedModel, case: AnyCase, call: Call) -> Loss:
    ids = case.inputs(call)
    labels = torch.full_like(ids, -100)
    for row, first, end in call.spans:
        labels[row, first:end] = ids[row, first:end] % (model.config.num_labels or 1)

    def alone(number: int) -> dict[str, torch.Tensor]:
        row, first, end = call.spans[number]
        return {"labels": labels[row, first:end][None]}

    return Loss({"labels": labels}, alone, [end - first for _, first, end in call.spans])


def _next_tokens(model: PreTrainedModel, case: AnyCase, call: Call) -> Loss:
    ids = case.inputs(call)
    labels = torch.full_like(ids, -100)
    skipped = int(
        call.source is None and shifts_labels(model)
    )  # a loss that shifts never uses the first label of a document
    # Stock, the caller has to mask it, as every collator for packing does; enabled, that is left to autopack.
    masked = skipped if handle_of(model) is None else 0
    for row, first, end in call.spans:
        labels[row, first + masked : end] = ids[row, first + masked : end]

    def alone(number: int) -> dict[str, torch.Tensor]:
        row, first, end = call.spans[number]
        return {"labels": _as_labels(model, ids[row, first:end][None])}

    counts = [end - first - skipped for _, first, end in call.spans]
    return Loss({"labels": _as_labels(model, labels)}, alone, counts)


def _as_labels(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Models of audio codes have one label per codebook: (rows, columns, codebooks)."""
    codebooks = model.get_input_embeddings()
    return tokens[..., None].expand(-1, -1, len(codebooks)) if isinstance(codebooks, nn.ModuleList) else tokens
