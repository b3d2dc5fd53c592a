"""The part of a model that an audit can call, and the reading of its report."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from autopack.auditing.cases import empty_images
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.report import LeakReport
from autopack.inspection.code import ModelCode
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, entries, takes_tokens
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock

_IMAGES = "pixel_values|flattened_patches"
LENGTHS = (7, 11, 5)
"""Of the documents of an audit: one has neighbours on both sides, and two have another one between them.

Their sum is a prime, so that columns are not taken for heads or channels of that number."""


def callable_part(enabled: EnabledModel) -> PreTrainedModel:
    """The outermost model inside that can be called with tokens by their name: a forward may have others for them."""
    nested = enabled.anatomy.entries
    for module in nested[:-1]:
        if _is_of_choices(module) or not takes_tokens(module):
            continue
        try:
            with left_as_found(module), stock(enabled), torch.no_grad():
                token = torch.zeros(1, 1, dtype=torch.long, device=device_of(module))
                module(input_ids=token, **empty_images(module)(token))
                return module
        except Exception as error:
            # An encoder-decoder wants tokens for both halves: that is what the audit knows how to give.
            misses_tokens = isinstance(error, TypeError) and "input_ids" in str(error)
            misses_images = isinstance(error, TypeError | ValueError) and re.search(_IMAGES, str(error))
            if not (misses_tokens or misses_images):
                return module
    return nested[-1]


def why_padding_is_unknown(model: PreTrainedModel, tested: PreTrainedModel) -> str | None:
    """Return the reason why padding is unknown to a model's forward if only the model in it was tested, or None.

    Transformers' heads for choices make them the rows of a batch and read the first token of each.
    """
    if tested is model:
        return None
    own = _is_of_choices(model) and ModelCode(model).around(model) is None
    if own and any(tested is inner for inner in entries(model)[1:2]):
        summaries = {vars(module).get("summary_type", "first") for module in model.modules()}
        return None if summaries == {"first"} else "its head reads others than the first token of a choice"
    return f"nobody has seen what the forward of {type(model).__name__} does with padding"


def why_not_left_out(report: LeakReport, is_whole: bool) -> str | None:
    """Return why fields that nobody can attribute cannot be left out: code around a part may read them."""
    if is_whole or not report.unattributed:
        return None
    fields = ", ".join(sorted(report.unattributed))
    return f"nobody can tell which part of {fields} belongs to which document, and the forward around it may read that"


def is_in_its_head(model: PreTrainedModel, report: LeakReport, causal: bool) -> bool:
    """Return True if documents of packed rows meet only in the head that reads the states of the encoder.

    The encoder is transformers' own, so it can run padded batches without their padding and give the states back; the
    audit has seen that the head does with them what it does in stock. Who enables a `causal` model has packed rows in
    mind, and hears at once that they are not exact.
    """
    inner = entries(model)[1:2]
    if causal or not inner or not report.runs_without_padding:
        return False
    code = ModelCode(inner[0])
    return not code.foreign and code.hook is None


def _is_of_choices(module: PreTrainedModel) -> bool:
    head = row_head(module)
    return head is not None and head.of_choices
