"""Find out by runs on a few tokens which labels a model's loss takes, and how it treats them; names
prove nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.cases import empty_images, tokens_to_draw
from autopack.auditing.compare import Fields, largest, relative_error
from autopack.auditing.fields import fields_of
from autopack.auditing.left_as_found import left_as_found
from autopack.auditing.running import dtype_of
from autopack.calls.outputs import loss_of, parts_of
from autopack.errors import UnsupportedModel
from autopack.inspection.heads import is_head_of_pair, row_head
from autopack.inspection.modules import device_of
from autopack.inspection.randomness import normal_numbers
from autopack.inspection.source import parameters_of

LABELS = ("labels", "start_positions", "end_positions")
_ROWS, _COLUMNS = 2, 6
"""Two rows, of three and of four labelled columns.

Labels of one per token fit no head with one label per row in both.
"""
_SAME = 1e-3
"""Largest relative change that counts as none.

A label that counts changes gradients of logits by about one. One that does not changes them by
rounding at most: 1e-2 only where gradients are bfloat16 and kernels draw another order.
"""

Run = Callable[..., Any]
"""A function that calls a model with arguments by name."""


def first_label_counts(model: PreTrainedModel) -> bool | None:
    """Return True if the loss of a model uses the first label of a row.

    False for a loss that shifts labels, as causal language models do; True for one that compares
    logits and labels of one column. None if the forward gives no loss for labels of one per token,
    or one that no label changes. The model runs as it stands, in eval mode and, if that gives no
    loss, in train mode; ask a model that autopack has enabled inside
    `autopack.runtime.scope.stock`. Weights, buffers, modes, random state and configuration are left
    as they were.
    """
    empty = empty_images(model)

    def run(**given: Any) -> Any:
        images = empty(given["input_ids"]) if "input_ids" in given else {}
        return labelled(model, partial(model, **given, **images))

    # It is not asked about the cache, of which stock raises where a class counts other layers than
    # it has.
    plain = {"use_cache": False} if "use_cache" in argument_names(model) else {}
    with left_as_found(model):
        for train in (False, True):
            model.train(train)
            for question, labels in _questions(model, run):
                arguments = question | plain
                narrow = {
                    n: v[:, :-1].contiguous() if isinstance(v, torch.Tensor) else v
                    for n, v in arguments.items()
                }
                answer = _ask(run, narrow, labels[:, :-1].contiguous())
                if answer is not None and _hear(run, arguments, labels) is not None:
                    return answer
    return None


def argument_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments that a model takes."""
    return set(parameters_of(type(model)).names)


def _questions(model: PreTrainedModel, run: Run) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield arguments without labels, and labels of one per token, in possible forms."""
    try:
        allowed = tokens_to_draw(model)
    except UnsupportedModel:
        return
    picked = torch.arange(_ROWS * _COLUMNS) * 7 % len(allowed)
    tokens = allowed[picked].reshape(_ROWS, _COLUMNS).to(device_of(model))
    for arguments in _inputs(model, tokens):
        try:
            with torch.no_grad():
                fields = fields_of(run(**arguments))
        except Exception:
            fields = {}  # arguments of this form are not taken, or not without labels
        width = width_of(fields, (_ROWS, _COLUMNS))
        yield from ((arguments, labels) for labels in labels_of(model, tokens, width))


def labels_of(
    model: PreTrainedModel, tokens: torch.Tensor, width: int | None
) -> Iterator[torch.Tensor]:
    """Yield labels of one per token (rows, columns), in the forms that a model may take.

    They are classes (below `width`), classes of each codebook, or numbers.
    """
    labels = tokens if width is None else tokens % max(width, 2)
    yield labels
    with suppress(NotImplementedError):
        embeddings = model.get_input_embeddings()
        if isinstance(embeddings, nn.ModuleList):  # a token for each of several codebooks of audio
            yield labels[..., None].expand(-1, -1, len(embeddings)).contiguous()
    yield (labels % 2).to(dtype_of(model))


def _inputs(model: PreTrainedModel, tokens: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield arguments without labels in the forms in which a model may take these tokens."""
    names = argument_names(model)
    if "decoder_input_ids" in names or getattr(model.config, "is_encoder_decoder", False):
        # Without the decoder's tokens, they would be made of the labels, and every label would
        # count.
        if "input_ids" in names or not names & {"decoder_input_ids"}:
            yield {"input_ids": tokens, "decoder_input_ids": tokens}
        size = getattr(model.config, "hidden_size", None) or getattr(model.config, "d_model", None)
        if isinstance(size, int):
            states = normal_numbers((_ROWS, 4, size), torch.Generator().manual_seed(0))
            yield {
                "encoder_outputs": (states.to(tokens.device, dtype_of(model)),),
                "decoder_input_ids": tokens,
            }
    if "decoder_input_ids" not in names:
        yield {"input_ids": tokens}


def width_of(fields: Fields, shape: tuple[int, int]) -> int | None:
    """Return the number of classes that are predicted for each token of (rows, columns); None if
    that is not told."""
    scores = {
        n: value for n, value in fields.items() if value.is_floating_point() and value.dim() > 2
    }
    named = sorted(scores, key=lambda name: name != "logits")
    return next((scores[name].shape[-1] for name in named if scores[name].shape[:2] == shape), None)


def _ask(run: Run, arguments: dict[str, Any], labels: torch.Tensor) -> bool | None:
    """Return True if the first label counts; None if neither it nor the next ones make a difference
    if replaced."""

    def replaced(column: int) -> torch.Tensor:
        changed = labels.clone()
        # The labels of the other row are drawn from the same classes.
        differing = labels[1:][labels[1:] != labels[0, column]]
        changed[0, column] = differing[0] if differing.numel() else 1 - labels[0, column]
        return changed

    heard = _hear(run, arguments, labels)
    first, *others = (heard and _hear(run, arguments, replaced(column)) for column in range(3))
    if heard is None or first is None:
        return None
    if _differ(heard, first):
        return True
    return False if any(other is not None and _differ(heard, other) for other in others) else None


def _hear(run: Run, arguments: dict[str, Any], labels: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the loss of a seeded run with labels, and its gradients by the outputs; or None.

    None if that gives no loss.
    """
    torch.manual_seed(0)
    try:
        output = run(**arguments, labels=labels)
    except Exception:
        return None  # labels of this form are not taken
    loss = loss_of(output)
    if loss is None:
        return None
    parts = [
        part for part in parts_of(output).values() if isinstance(part, torch.Tensor) and part.dim()
    ]
    parts = [part for part in parts if part.is_floating_point() and part.requires_grad]
    slopes = (
        torch.autograd.grad(loss, parts, allow_unused=True) if loss.requires_grad and parts else ()
    )
    return [each.detach().double() for each in (loss, *slopes) if each is not None]


def _differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return True if two runs differ in their gradients, or in losses without usable gradients.

    A number differs from one that is none.
    """
    # Losses in low precision, or of logits that are all alike, may agree although their labels do
    # not.
    slopes = list(zip(one[1:], other[1:], strict=False))
    size = max((float(slope.abs().max()) for pair in slopes for slope in pair), default=0.0)
    if size > 0 and math.isfinite(size) and bool(one[0].isfinite() & other[0].isfinite()):
        return max(largest(*pair) for pair in slopes) > _SAME * size
    return relative_error(one[0], other[0]) > 1e-7


def labelled(model: PreTrainedModel, run: Callable[[], Any]) -> Any:
    """Run a call with labels, raise where torch would broadcast them, and restore
    `problem_type`."""
    before = getattr(model.config, "problem_type", None)
    try:
        with warnings.catch_warnings():
            # Torch compares shapes that do not fit by repeating one of them, and warns: those are
            # no labels of tokens.
            warnings.filterwarnings("error", message="Using a target size")
            return run()
    finally:
        # A loss that finds none writes its guess there, and labels of another form are tried
        # afterwards.
        if getattr(model.config, "problem_type", None) != before:
            model.config.problem_type = before


def check_can_be_audited(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for a model that takes no tokens, or refuses packed rows."""
    names, head, why = argument_names(model), row_head(model), None
    if "decoder_input_ids" in names and "input_ids" not in names:
        why = "it takes recordings, of which the auditor has none"
    elif head is not None and head.refusal is not None:
        why = f"{head.refusal}, so its packed rows are refused. Pass padded batches"
    elif head is None and is_head_of_pair(model):
        why = "its head does not predict its decoder's tokens, so its packed rows are refused"
    if why is not None:
        raise UnsupportedModel(
            f"{type(model).__name__}: nothing to audit: {why}", code="nothing-to-audit"
        )
