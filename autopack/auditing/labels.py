"""Labels that a model's loss takes, found by runs of stock on documents alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from autopack.auditing.asking import (
    LABELS,
    argument_names,
    first_label_counts,
    labelled,
    labels_of,
    width_of,
)
from autopack.auditing.cases import Case, Input
from autopack.auditing.compare import Fields
from autopack.auditing.fields import Side, Sides
from autopack.auditing.running import run_as_stock, stock_again
from autopack.calls.outputs import loss_of
from autopack.layout import IGNORED_LABEL
from autopack.runtime.scope import enabled_in


@dataclass
class Labels:
    """Labels of each document, (1, ...) by argument, and the terms in each one's mean loss.

    Labels of one per token and of one per document may be together, if documents have equally many
    of the former: the loss is then the mean of the documents'.
    """

    alone: list[dict[str, torch.Tensor]]
    counts: list[int]
    per_token: bool
    ignore_first: bool = False
    """True if the first label of every document is ignored in a packed row."""
    shifts: bool = False
    """True if the loss compares each label with the prediction at the token before it."""

    def packed(self, call: Input, only: int | None = None) -> dict[str, torch.Tensor]:
        """Return the labels of a packed call; those of one document `only` if asked, and others
        ignored."""
        return self._placed(call.sides.halves[0], int(self.ignore_first), only)

    def padded(self, sides: Sides, predicted: bool = False) -> dict[str, torch.Tensor]:
        """Return the labels of a padded batch of the documents; labels of padding are ignored.

        With `predicted`, labels that a loss would compare with a prediction at padding are ignored
        too.
        """
        side = sides.halves[0]
        found = self._placed(side, int(predicted and self.shifts))
        if "start_positions" in found:
            starts = torch.from_numpy((side.owner >= 0).argmax(1))
            found = {name: value + starts.to(value.device) for name, value in found.items()}
        return found

    def _placed(self, side: Side, skipped: int, only: int | None = None) -> dict[str, torch.Tensor]:
        """Return the labels put where documents lie, each one's first `skipped` ignored."""
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


def expected_losses(losses: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
    """Return the mean of the losses, weighted by their counts of terms, and their sum."""
    terms = [
        (loss.double(), count) for loss, count in zip(losses, counts, strict=True) if count > 0
    ]
    total = sum(count for _, count in terms)
    mean = torch.stack([loss * (count / total) for loss, count in terms]).sum()
    return [mean, torch.stack([loss for loss, _ in terms]).sum()]


def find_labels(
    model: PreTrainedModel, case: Case, alone: list[Fields], ignore_boundaries: bool
) -> tuple[Labels | None, str | None]:
    """Return labels that stock's loss takes for documents alone, or the reason why there are none.

    The reason is None for a model without a loss. `alone` holds the documents' results alone.
    `ignore_boundaries` says that the caller masks the first labels of packed documents, as
    collators do for stock.
    """
    number = max(range(len(case.documents)), key=lambda i: len(case.documents[i]))  # the longest

    def refusal(made: list[dict[str, torch.Tensor]]) -> str | None:
        given = {**case.by_itself(number), **made[number], **case.without_router}
        try:
            loss = loss_of(labelled(model, lambda: run_as_stock(model, given)))
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return "it gives no loss" if loss is None else None

    with stock_again(model, enabled_in(model)):
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
        forms = [Labels(made, one_each, False) for made in _per_row(case, alone)]
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
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield labels of one per token for each document, in the forms that the model may take."""
    width = width_of(alone[0], (1, case.lengths[0]))
    of_each = (labels_of(model, document[None], width) for document in case.documents)
    for form in zip(*of_each, strict=True):
        yield [{"labels": labels} for labels in form]


def _per_token_and_document(case: Case) -> list[dict[str, torch.Tensor]]:
    """Return labels of each document's last tokens, and a `next_sentence_label` for it.

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


def _per_row(case: Case, alone: list[Fields]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield labels of one per document: a class or number, one per class, or a start and an end."""
    named = sorted(alone[0], key=lambda name: name != "logits")
    shapes = ({tuple(fields[name].shape) for fields in alone} for name in named)
    width = next(
        (shape[1] for shape, *others in shapes if not others and len(shape) == 2 and shape[0] == 1),
        None,
    )
    numbers = torch.arange(len(case.documents), device=case.device)
    if width is not None:
        dtype = next(iter(alone[0].values())).dtype
        if width > 1:
            yield [{"labels": number[None] % width} for number in numbers]
        else:
            yield [{"labels": (number[None] / 4).to(dtype)} for number in numbers]
        table = ((numbers[:, None] + torch.arange(width, device=case.device)) % 2).to(dtype)
        yield [{"labels": row[None]} for row in table]
    lengths = torch.tensor(case.lengths, device=case.device)
    ends = [{"start_positions": (n // 2)[None], "end_positions": (n - 1)[None]} for n in lengths]
    yield ends
