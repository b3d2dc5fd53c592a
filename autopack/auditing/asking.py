"""Find out by runs on a few tokens how a model's loss treats labels; names prove nothing."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopack.auditing.cases import empty_images, tokens_to_draw
from autopack.auditing.left_as_found import left_as_found
from autopack.calls.outputs import loss_of
from autopack.errors import UnsupportedModel
from autopack.inspection.heads import is_head_of_pair, row_head
from autopack.inspection.modules import device_of
from autopack.inspection.randomness import normal_numbers
from autopack.layout import IGNORED_LABEL

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


@dataclass(frozen=True)
class _Heard:
    """The result of one run with labels: its loss, and its slopes by the model's results."""

    loss: float
    slopes: tuple[torch.Tensor, ...]

    def differs(self, other: _Heard) -> bool:
        """Return True if two runs had different losses; a number differs from one that is none."""
        if math.isfinite(self.loss) != math.isfinite(other.loss):
            return True
        if not math.isfinite(self.loss):
            return False
        if len(self.slopes) == len(other.slopes) != 0:
            # Losses in low precision, or of logits that are all alike, may agree although their labels do not.
            pairs = [(a.double(), b.double()) for a, b in zip(self.slopes, other.slopes, strict=True)]
            largest = max(float(max(a.abs().max(), b.abs().max())) for a, b in pairs)
            if math.isfinite(largest) and largest > 0:
                return max(float((a - b).abs().max()) for a, b in pairs) > _SAME * largest
        return abs(self.loss - other.loss) > 1e-7 * max(abs(self.loss), abs(other.loss))


def first_label_counts(model: PreTrainedModel, run: Run | None = None) -> bool | None:
    """Return True if the loss of a model uses the first label of a row.

    False for a loss that shifts labels, as causal language models do; True for one that compares
    logits and labels of one column. None if the forward gives no loss for labels of one per token,
    or one that no label changes. The model runs as it stands, in eval mode and, if that gives no
    loss, in train mode; ask a model that autopack has enabled inside
    `autopack.runtime.scope.stock`. Weights, buffers, modes, random state and configuration are left
    as they were. `run` calls the model, for callers that count calls.
    """
    run = _with_empty_images(model, run or model)
    with left_as_found(model):
        for train in (False, True):
            model.train(train)
            for arguments, labels in _questions(model, run):
                narrow = {n: v[:, :-1].contiguous() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
                answer = _ask(run, narrow, labels[:, :-1].contiguous())
                if answer is not None and _hear(run, arguments, labels) is not None:
                    return answer
    return None


def _with_empty_images(model: PreTrainedModel, run: Run) -> Run:
    empty = empty_images(model)
    return lambda **given: run(**given, **(empty(given["input_ids"]) if "input_ids" in given else {}))


def takes_both_halves(model: PreTrainedModel) -> bool:
    """Return True if a model takes tokens for both halves, by its signature and configuration."""
    return "decoder_input_ids" in argument_names(model) or bool(getattr(model.config, "is_encoder_decoder", False))


def codebooks_of(model: PreTrainedModel) -> int | None:
    """Return the tokens per column in models of audio codes (rows, columns, codebooks), or None."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return len(embeddings) if isinstance(embeddings, nn.ModuleList) else None


def argument_names(model: nn.Module) -> set[str]:
    """Return the argument names of a class's forwards: `(*args, **kwargs)` hides its bases'."""
    forwards = [vars(cls)["forward"] for cls in type(model).__mro__ if cls is not nn.Module and "forward" in vars(cls)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}


def _questions(model: PreTrainedModel, run: Run) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield arguments without labels, and labels of one per token, in possible forms."""
    try:
        allowed = tokens_to_draw(model)
    except UnsupportedModel:
        return
    picked = torch.arange(_ROWS * _COLUMNS) * 7 % len(allowed)
    tokens = allowed[picked].reshape(_ROWS, _COLUMNS).to(device_of(model))
    for arguments in _inputs(model, tokens):
        yield from ((arguments, labels) for labels in labels_of(model, tokens, _width(run, arguments)))


def labels_of(model: PreTrainedModel, tokens: torch.Tensor, width: int | None) -> Iterator[torch.Tensor]:
    """Yield labels of one per token (rows, columns), in the forms that a model may take.

    They are classes (below `width`), classes of each codebook, or numbers.
    """
    labels = tokens if width is None else tokens % max(width, 2)
    yield labels
    if (codebooks := codebooks_of(model)) is not None:
        yield labels[..., None].expand(-1, -1, codebooks).contiguous()
    yield (labels % 2).to(_dtype_of(model))


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _inputs(model: PreTrainedModel, tokens: torch.Tensor) -> Iterator[dict[str, Any]]:
    names = argument_names(model)
    if takes_both_halves(model):
        # Without the decoder's tokens, they would be made of the labels, and every label would count.
        if "input_ids" in names or not names & {"decoder_input_ids"}:
            yield {"input_ids": tokens, "decoder_input_ids": tokens}
        size = getattr(model.config, "hidden_size", None) or getattr(model.config, "d_model", None)
        if isinstance(size, int):
            states = normal_numbers((_ROWS, 4, size), torch.Generator().manual_seed(0))
            yield {"encoder_outputs": (states.to(tokens.device, _dtype_of(model)),), "decoder_input_ids": tokens}
    if "decoder_input_ids" not in names:
        yield {"input_ids": tokens}


def _width(run: Run, arguments: dict[str, Any]) -> int | None:
    """Return the number of predicted classes per token, or None if it needs labels to tell."""
    try:
        with torch.no_grad():
            output = run(**arguments)
    except Exception:
        return None  # arguments of this form are not taken, or not without labels
    tensors = [part for part in tensors_of(output) if part.shape[:2] == (_ROWS, _COLUMNS) and part.dim() > 2]
    named = getattr(output, "logits", None)
    chosen = named if any(part is named for part in tensors) else next(iter(tensors), None)
    return None if chosen is None else chosen.shape[-1]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of an output that are not nested inside its parts."""
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def _ask(run: Run, arguments: dict[str, Any], labels: torch.Tensor) -> bool | None:
    """Return True if the first label counts: replaced or, if that does not tell, ignored."""

    def other(column: int) -> torch.Tensor:
        changed = labels.clone()
        # The labels of the other row are drawn from the same classes.
        differing = labels[1:][labels[1:] != labels[0, column]]
        changed[0, column] = differing[0] if differing.numel() else 1 - labels[0, column]
        return changed

    def only(column: int | None) -> torch.Tensor:
        found = torch.full_like(labels, IGNORED_LABEL)
        if column is not None:
            found[0, column] = labels[0, column]
        return found

    for plain, with_first, with_others in (
        (labels, other(0), [other(1), other(2)]),
        # A device-side assert of a loss that does not know the ignored label could not be survived on an accelerator.
        *([(only(None), only(0), [only(1), only(2)])] if labels.device.type == "cpu" else []),
    ):
        heard = _hear(run, arguments, plain)
        first = heard and _hear(run, arguments, with_first)
        if heard is None or first is None:
            continue
        if heard.differs(first):
            return True
        rest = [_hear(run, arguments, each) for each in with_others]
        if any(each is not None and heard.differs(each) for each in rest):
            return False
    return None


def _hear(run: Run, arguments: dict[str, Any], labels: torch.Tensor) -> _Heard | None:
    """Run with labels, from the same random state each time; return None if that gives no loss."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            # Torch compares shapes that do not fit by repeating one of them, and warns: those are no labels of tokens.
            warnings.filterwarnings("error", message="Using a target size")
            output = run(**arguments, labels=labels)
    except Exception:
        return None  # labels of this form are not taken
    loss = loss_of(output)
    if loss is None:
        return None
    parts = [part for part in tensors_of(output) if part is not loss and part.requires_grad and part.dim()]
    slopes: tuple[torch.Tensor | None, ...] = ()
    if loss.requires_grad and parts:
        slopes = torch.autograd.grad(loss, parts, allow_unused=True)
    return _Heard(float(loss.detach()), tuple(slope for slope in slopes if slope is not None))


def check_can_be_audited(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for a model that takes no tokens, or refuses packed rows."""
    names = argument_names(model)
    if "decoder_input_ids" in names and "input_ids" not in names:
        raise UnsupportedModel(f"{type(model).__name__} takes recordings, of which the auditor has none")
    head = row_head(model)
    if head is not None and head.refusal is not None:
        raise UnsupportedModel(
            f"{type(model).__name__}: {head.refusal}, so its packed rows are refused: "
            f"nothing to audit. Pass padded batches"
        )
    if is_head_of_pair(model) and head is None:
        why = "has a head that does not predict its decoder's tokens, so its packed rows are refused: nothing to audit"
        raise UnsupportedModel(f"{type(model).__name__} {why}")
