"""Questions to a model, answered by runs on a few tokens: which labels its loss takes, and how it
treats them. Names prove nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from autopack.auditing.cases import Case, Input, empty_images, tokens_to_draw
from autopack.auditing.compare import Arguments, Fields, largest, relative_error
from autopack.auditing.fields import Side, Sides, fields_of
from autopack.auditing.running import (
    dtype_of,
    gradients_of,
    left_as_found,
    run_as_stock,
    stock_again,
)
from autopack.calls.outputs import loss_of
from autopack.errors import UnsupportedModel
from autopack.inspection.heads import is_head_of_pair, row_head
from autopack.inspection.modules import device_of
from autopack.inspection.randomness import normal_numbers
from autopack.inspection.source import parameters_of
from autopack.layout import IGNORED_LABEL

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
    """Return True if a model's loss uses a row's first label, False if not; None if it uses none.

    False for a loss that shifts labels, as causal language models do; True for one that compares
    logits and labels of one column. None if the forward gives no loss for labels of one per token,
    or one that no label changes. The model runs as stock, in eval mode and, if that gives no loss,
    in train mode. Weights, buffers, modes, random state and configuration are left as they were.
    """

    def run(**given: Any) -> Any:
        images = empty_images(model, given["input_ids"]) if "input_ids" in given else {}
        return run_labelled(model, partial(model, **given, **images))

    # It is not asked about the cache, of which stock raises where a class counts other layers than
    # it has.
    plain = {"use_cache": False} if "use_cache" in argument_names(model) else {}
    with left_as_found(model), stock_again(model):
        for train in (False, True):
            model.train(train)
            for question in _trial_calls(model, run):
                arguments = question | plain
                narrow = {
                    n: v[:, :-1].contiguous() if isinstance(v, Tensor) else v
                    for n, v in arguments.items()
                }
                answer = _uses_first_label(run, narrow)
                if answer is not None and _loss_and_gradients(run, arguments) is not None:
                    return answer
    return None


def argument_names(model: nn.Module) -> set[str]:
    """Return the names of the arguments of a model's forward."""
    return set(parameters_of(type(model)).names)


def _trial_calls(model: PreTrainedModel, run: Run) -> Iterator[Arguments]:
    """Yield arguments with one label per token, in each form to try; `run` tells class counts."""
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
        yield from (arguments | {"labels": each} for each in labels_of(model, tokens, width))


def labels_of(model: PreTrainedModel, tokens: Tensor, width: int | None) -> Iterator[Tensor]:
    """Yield labels made of `tokens` (rows, columns), one per token, in each form that losses take.

    They are classes (below `width`), classes of each codebook, or numbers.
    """
    labels = tokens if width is None else tokens % max(width, 2)
    yield labels
    with suppress(NotImplementedError):
        embeddings = model.get_input_embeddings()
        if isinstance(embeddings, nn.ModuleList):  # a token for each of several codebooks of audio
            yield labels[..., None].expand(-1, -1, len(embeddings)).contiguous()
    yield (labels % 2).to(dtype_of(model))


def _inputs(model: PreTrainedModel, tokens: Tensor) -> Iterator[Arguments]:
    """Yield arguments with these tokens and without labels, in each form that models take."""
    names = argument_names(model)
    if "decoder_input_ids" in names or getattr(model.config, "is_encoder_decoder", False):
        # Without the decoder's tokens, they would be made of the labels, and every label would
        # count.
        if "input_ids" in names or "decoder_input_ids" not in names:
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
    """Return how many classes a floating field (*shape, classes) has, best the logits, or None."""
    scores = {
        n: value for n, value in fields.items() if value.is_floating_point() and value.dim() > 2
    }
    named = sorted(scores, key=lambda name: name != "logits")
    return next((scores[name].shape[-1] for name in named if scores[name].shape[:2] == shape), None)


def _uses_first_label(run: Run, arguments: Arguments) -> bool | None:
    """Return True if another first label changes the loss, False if later ones do; None if none."""
    labels = arguments["labels"]

    def with_other_label(column: int) -> Arguments:
        changed = labels.clone()
        # The labels of the other row are drawn from the same classes.
        differing = labels[1:][labels[1:] != labels[0, column]]
        changed[0, column] = differing[0] if differing.numel() else 1 - labels[0, column]
        return arguments | {"labels": changed}

    heard = _loss_and_gradients(run, arguments)
    for column in range(3):
        changed = heard and _loss_and_gradients(run, with_other_label(column))
        if heard and changed and _differ(heard, changed):
            return not column
        if not (changed or column):
            break
    return None


def _loss_and_gradients(run: Run, arguments: Arguments) -> list[Tensor] | None:
    """Return [loss, *gradients by outputs] of a seeded run; None if it raises or has no loss."""
    torch.manual_seed(0)
    try:
        output = run(**arguments)
    except Exception:
        return None  # labels of this form are not taken
    loss = loss_of(output)
    if loss is None:
        return None
    parts = [value for value in fields_of(output).values() if value.dim() and value.requires_grad]
    slopes = gradients_of(loss, parts) if loss.requires_grad and parts else []
    return [each.detach().double() for each in (loss, *slopes)]


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return True if two runs' gradients differ, or their losses where all gradients are 0 or NaN.

    A number differs from one that is none.
    """
    # Losses in low precision, or of logits that are all alike, may agree although their labels do
    # not.
    slopes = list(zip(one[1:], other[1:], strict=False))
    size = max((float(slope.abs().max()) for pair in slopes for slope in pair), default=0.0)
    if size > 0 and math.isfinite(size) and bool(one[0].isfinite() & other[0].isfinite()):
        return max(largest(*pair) for pair in slopes) > _SAME * size
    return relative_error(one[0], other[0]) > 1e-7


def run_labelled(model: PreTrainedModel, run: Callable[[], Any]) -> Any:
    """Return `run()`, raising where torch would broadcast labels; restore `config.problem_type`."""
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
    """Raise `UnsupportedModel` for a model that takes no tokens or refuses packed rows."""
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


@dataclass
class Labels:
    """Labels of each document, (1, ...) by argument, and the number of terms in its mean loss.

    Labels of one per token and of one per document may be together, if documents have equally many
    of the former: the loss is then the mean of the documents'.
    """

    alone: list[dict[str, Tensor]]
    counts: list[int]
    per_token: bool
    ignore_first: bool = False
    """True if the first label of every document is ignored in a packed row."""
    shifts: bool = False
    """True if the loss compares each label with the prediction at the token before it."""

    def packed(self, call: Input, only: int | None = None) -> dict[str, Tensor]:
        """Return a packed call's labels by argument, -100 in documents other than `only`."""
        return self._placed(call.sides.halves[0], int(self.ignore_first), only)

    def padded(self, sides: Sides, predicted: bool = False) -> dict[str, Tensor]:
        """Return a padded batch's labels by argument, -100 at padding.

        With `predicted`, labels that a loss would compare with a prediction at padding are ignored
        too.
        """
        side = sides.halves[0]
        found = self._placed(side, int(predicted and self.shifts))
        if "start_positions" in found:
            starts = torch.from_numpy((side.owner >= 0).argmax(1))
            found = {name: value + starts.to(value.device) for name, value in found.items()}
        return found

    def _placed(self, side: Side, skipped: int, only: int | None = None) -> dict[str, Tensor]:
        """Return labels by argument at their documents' tokens, -100 at the first `skipped`."""
        found = {}
        for name, example in self.alone[0].items():
            of_each = {number: self.alone[number % len(self.alone)][name] for number in side.order}
            if not self.per_token or example.dim() == 1:
                ignored = torch.full_like(example, IGNORED_LABEL)
                chosen = [
                    value if only in (None, number) else ignored
                    for number, value in of_each.items()
                ]
                found[name] = torch.cat(chosen)
                continue
            found[name] = example.new_full((*side.owner.shape, *example.shape[2:]), IGNORED_LABEL)
            for number in side.order if only is None else [only]:
                row, (first, end) = side.place_of(number)
                found[name][row, first + skipped : end] = of_each[number][0, skipped:]
        return found


def expected_losses(losses: list[Tensor], counts: list[int]) -> list[Tensor]:
    """Return [mean of documents' losses weighted by their `counts` of terms, sum of losses]."""
    found = torch.stack([loss.double() for loss, n in zip(losses, counts, strict=True) if n > 0])
    terms = found.new_tensor([n for n in counts if n > 0])
    return [(found * terms).sum() / terms.sum(), found.sum()]


def find_labels(
    model: PreTrainedModel, case: Case, alone: list[Fields], ignore_boundaries: bool
) -> tuple[Labels | None, str | None]:
    """Return (labels that stock's loss takes for documents alone, None), or (None, the reason).

    The reason is None for a model without a loss. `alone` holds the documents' results alone.
    `ignore_boundaries` says that the caller masks the first labels of packed documents, as
    collators do for stock.
    """
    number = max(range(len(case.documents)), key=lambda i: len(case.documents[i]))  # the longest

    def refusal(made: list[dict[str, Tensor]]) -> str | None:
        """Return the reason if stock gives no loss for the longest document's labels, or None."""
        given = {**case.by_itself(number), **made[number], **case.without_router}
        try:
            loss = loss_of(run_labelled(model, lambda: run_as_stock(model, given)))
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return "it gives no loss" if loss is None else None

    counts_first = first_label_counts(model)
    of_tokens, one_each = _per_token(model, case, alone), [1] * len(case.documents)
    forms: Iterable[Labels]
    said: str | None = None
    if counts_first is not None:
        shifts = not counts_first
        counts = [len(document) - shifts for document in case.documents]
        forms = (
            Labels(made, counts, True, ignore_boundaries and shifts, shifts) for made in of_tokens
        )
    else:
        said = refusal(next(of_tokens)) or "its loss heeds no label of a token"
        forms = [Labels(made, one_each, False) for made in _per_document(case, alone)]
        if {"labels", "next_sentence_label"} <= argument_names(model):
            forms.append(Labels(_per_token_and_document(case), one_each, True))
    for labels in forms:
        objection = refusal(labels.alone)
        if objection is None:
            return labels, None
        said = said or objection
    return None, said if argument_names(model) & set(LABELS) else None


def _per_token(
    model: PreTrainedModel, case: Case, alone: list[Fields]
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield, form by form, the labels of every document, one per token."""
    width = width_of(alone[0], (1, case.lengths[0]))
    of_each = (labels_of(model, document[None], width) for document in case.documents)
    for form in zip(*of_each, strict=True):
        yield [{"labels": labels} for labels in form]


def _per_token_and_document(case: Case) -> list[dict[str, Tensor]]:
    """Return each document's labels of its last tokens, and its `next_sentence_label`.

    Each document has as many labels as the shortest has tokens.
    """
    count, found = min(case.lengths), []
    for number, document in enumerate(case.documents):
        labels = document[None].clone()
        labels[:, :-count] = IGNORED_LABEL
        found.append(
            {
                "labels": labels,
                "next_sentence_label": torch.tensor([number % 2], device=labels.device),
            }
        )
    return found


def _per_document(case: Case, alone: list[Fields]) -> Iterator[list[dict[str, Tensor]]]:
    """Yield, form by form, documents' labels: a class or number, one per class, start and end."""
    named = sorted(alone[0], key=lambda name: name != "logits")
    shapes = ({tuple(fields[name].shape) for fields in alone} for name in named)
    width = next(
        (shape[1] for shape, *others in shapes if not others and len(shape) == 2 and shape[0] == 1),
        None,
    )
    numbers = torch.arange(len(case.documents), device=case.device)
    if width is not None:
        dtype = next(iter(alone[0].values())).dtype
        table = (numbers[:, None] + torch.arange(width, device=case.device)) % 2
        one_each = numbers % width if width > 1 else (numbers / 4).to(dtype)
        for labels in (one_each, table.to(dtype)):
            yield [{"labels": each} for each in labels[:, None]]
    lengths = torch.tensor(case.lengths, device=case.device)[:, None]
    yield [{"start_positions": n // 2, "end_positions": n - 1} for n in lengths]
