"""Run a call of a case, and say what became of it.

    exact         fields, loss and gradients are what stock gives each document alone
    refused       autopack raises one of its errors
    no stock      stock builds no such model, or cannot run its documents alone in this form
    silent        other numbers, without an error
    crash         an error that autopack did not mean, where stock runs

A padded batch may give what stock gives the same batch instead, where that is something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopack.auditing.asking import expected_losses
from autopack.auditing.compare import BOUNDS, Fields, errors_between, gradient_error, relative_error
from autopack.auditing.fields import WrongShape, fields_of
from autopack.auditing.running import weighted_sum
from autopack.calls.outputs import loss_of
from autopack.errors import AutopackError, LeakDetected
from compat.common import said
from compat.fuzz.case import Arranged
from compat.fuzz.model import Asked, Model, NoStock, backward, taken

STATUSES = ("exact", "refused", "no stock", "silent", "crash")
BAD = ("silent", "crash")
TOLERANCES = {
    "float64": (1e-5, 1e-4, 1e-4),
    "float32": (BOUNDS[torch.float32].results, 1e-3, 1e-3),
    "bfloat16": (BOUNDS[torch.bfloat16].results, 0.2, 1e-2),
}
"""Fields, of the standard deviation of a field; gradients, of the largest of a parameter; losses,
relative: those of docs/trust.md. Most models go through float32 in code of their own, whatever
their dtype, and leaks start near 1e-2."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and why."""

    status: str
    reason: str = ""

    @property
    def bad(self) -> bool:
        """Whether autopack has broken its promise."""
        return self.status in BAD


@dataclass
class _Answer:
    """Each document's part of the fields that can be compared, the loss, and gradients where they
    are wanted."""

    documents: list[Fields]
    loss: torch.Tensor | None
    gradients: list[torch.Tensor] | None
    differentiated: frozenset[str] = frozenset()
    """The fields that gradients are of, where they are not the loss's."""


def judge(model: Model, arranged: Arranged) -> Verdict:
    """Run one call on an enabled model and compare it with stock."""
    try:
        asked = model.call(arranged)
        alone = [
            model.alone(number, offset, arranged, asked.labels is not None)
            for number, offset in arranged.each
        ]
    except NoStock as error:
        return Verdict("no stock", str(error))
    fields = [each for each, _ in alone]
    try:
        answer, expected = _answer(model, model.model, asked, arranged, fields)
    except (
        LeakDetected
    ) as error:  # of transformers' own code: a false alarm, or a leak that its twin has not
        return Verdict("crash", said(error))
    except AutopackError as error:
        return Verdict("refused", said(error))
    except WrongShape as error:
        unknown = not arranged.packs and _is_wrong_in_stock(model, asked, arranged, fields)
        return Verdict("no stock" if unknown else "silent", said(error))
    except Exception as error:
        upstream = _upstream(model, asked, arranged)
        return Verdict("crash", said(error)) if upstream is None else Verdict("no stock", upstream)
    differences = []
    try:
        for reference in _references(model, arranged, asked, alone, expected, answer):
            difference = _difference(model, arranged, asked, answer, reference)
            if difference is None:
                return Verdict("exact")
            differences.append(difference)
    except NoStock as error:
        return Verdict("no stock", str(error))
    return Verdict("silent", differences[0])


def _answer(
    model: Model, module: Any, asked: Asked, arranged: Arranged, alone: list[Fields]
) -> tuple[_Answer, list[Fields]]:
    """What a call gives, by document, and what the same fields are alone."""
    output = model.run(module, asked, arranged)
    found, expected, _ = asked.call.sides.split(fields_of(output), alone)
    if asked.labels is None and not any(found):
        raise WrongShape(
            "nothing of the output can be compared with documents alone: "
            f"{sorted(fields_of(output))}"
        )
    loss, gradients, names = loss_of(output), None, frozenset(found[0])
    if arranged.gradients:
        # what a layer leaves beside its result has none, in stock too
        if arranged.checkpointing == "reentrant":
            names = frozenset(name for name, value in found[0].items() if value.requires_grad)
        scales, kept = (
            model.scales(arranged, asked.labels is not None),
            [{n: e[n] for n in names} for e in found],
        )
        total = (
            loss
            if asked.labels is not None
            else _sum([weighted_sum([each], scales) for each in kept])
        )
        backward(total)
        gradients = taken(model.parameters(module))
    documents = [{n: v.detach() for n, v in each.items()} for each in found]
    return _Answer(documents, loss, gradients, names), expected


def _sum(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.stack(known).sum() if known else None


def _references(
    model: Model,
    arranged: Arranged,
    asked: Asked,
    alone: list[tuple[Fields, Any]],
    expected: list[Fields],
    answer: _Answer,
) -> Iterator[_Answer]:
    """What documents alone make of a call, and what stock makes of it where it packs nothing."""
    losses: list[torch.Tensor | None] = [None]
    weights = [[1.0] * len(alone)]
    names = answer.differentiated if asked.labels is None else None
    if asked.labels is not None:
        if any(loss is None for _, loss in alone):
            raise NoStock(
                "stock gives no loss for a document alone, although it gives one for another"
            )
        counts = [max(count, 0) for count in asked.labels.counts]
        # their mean over all terms, or their sum
        losses = list(expected_losses([loss for _, loss in alone], counts))
        weights = [
            [count / sum(counts) for count in counts],
            [float(count > 0) for count in counts],
        ]
    # Reentrant checkpointing loses gradients of what layers share (Gemma 4), in stock too.
    for each in [
        replace(arranged, checkpointing=how) for how in dict.fromkeys(("", arranged.checkpointing))
    ]:
        for loss, shares in zip(losses, weights, strict=True):
            gradients = model.gradients(each, names, shares) if arranged.gradients else None
            yield _Answer(expected, loss, gradients)
        if not arranged.packs:
            yield from _of_same_call(model, each, asked, [fields for fields, _ in alone])


def _of_same_call(
    model: Model, arranged: Arranged, asked: Asked, alone: list[Fields]
) -> Iterator[_Answer]:
    """What stock gives the same call; and without labels that it compares with what padding
    predicts."""
    forms = [asked]
    if asked.labels is not None:
        labels = asked.labels.padded(asked.call.sides, predicted=True)
        forms.append(replace(asked, arguments={**asked.arguments, **labels}))
    for form in forms:
        try:
            answer = _answer(model, model.stock, form, arranged, alone)[0]
        except Exception as error:
            raise NoStock(f"of the same call {said(error)}") from error
        values = [
            *(answer.gradients or ()),
            *(value for each in answer.documents for value in each.values()),
        ]
        if not all(bool(value.isfinite().all()) for value in values):
            raise NoStock("its results for the same call are not finite")
        yield answer
    if _reads_padding(model, arranged, asked, answer, alone):
        raise NoStock("its results for the same call change with what stands in padding")


def _reads_padding(
    model: Model, arranged: Arranged, asked: Asked, answer: _Answer, alone: list[Fields]
) -> bool:
    """Whether what stock gives documents of the same call changes with the tokens in padding, as it
    should not."""
    changed = {}
    for side in asked.call.sides.halves:
        name = f"{side.prefix}input_ids"
        if name in asked.arguments:
            padding = torch.from_numpy(side.owner < 0)
            changed[name] = asked.arguments[name].masked_fill(
                padding, int(model.pool.documents[0][0])
            )
    other, _ = _answer(
        model,
        model.stock,
        replace(asked, arguments={**asked.arguments, **changed}),
        replace(arranged, gradients=False),
        alone,
    )
    scales = model.scales(arranged, asked.labels is not None)
    errors = errors_between(other.documents, answer.documents, scales)
    return max(errors)[0] > TOLERANCES[model.spec.dtype][0]


def _is_wrong_in_stock(model: Model, asked: Asked, arranged: Arranged, alone: list[Fields]) -> bool:
    """Whether the results of stock for the same call cannot be told by document either."""
    try:
        _answer(model, model.stock, asked, arranged, alone)
    except WrongShape:
        return True
    return False


def _difference(
    model: Model, arranged: Arranged, asked: Asked, answer: _Answer, reference: _Answer
) -> str | None:
    """What of an answer is not what it is in a reference; None where all is."""
    of_fields, of_gradients, of_loss = TOLERANCES[model.spec.dtype]
    scales = model.scales(arranged, asked.labels is not None)
    errors = errors_between(answer.documents, reference.documents, scales)
    worst = max(range(len(errors)), key=lambda number: errors[number][0])
    if errors[worst][0] > of_fields:
        return (
            f"{errors[worst][1]} of document {worst} is off by {errors[worst][0]:.1e} of its "
            "standard deviation"
        )
    if reference.loss is not None:
        if answer.loss is None:
            return "there is no loss"
        if (error := relative_error(answer.loss, reference.loss)) > of_loss:
            return (
                f"the loss is {float(answer.loss.detach()):.8g}, and "
                f"{float(reference.loss.detach()):.8g} by stock"
            )
    if answer.gradients is not None and reference.gradients is not None:
        if [each.shape for each in answer.gradients] != [
            each.shape for each in reference.gradients
        ]:
            raise NoStock("its forward makes itself other parameters")
        error = gradient_error(answer.gradients, reference.gradients)
        if error > of_gradients:
            return f"gradients are off by {error:.1e} of the largest of a parameter"
    return None


def _upstream(model: Model, asked: Asked, arranged: Arranged) -> str | None:
    """What stock raises for a document alone in the form of a call, or for a token of padding if
    there is padding in packed rows (Funnel takes no document of one token); or for the same call
    where it packs nothing."""
    plain = replace(arranged, form="positions", mask=False, positional=0, offset=0, collator=())
    try:
        rows = [(number,) for number in asked.picks]
        if any(number < 0 for row in arranged.rows for number in row):
            rows.append((-1,))
        for row in rows:
            only = replace(plain, rows=(row,))
            given = model.call(only)
            for name in ("position_ids", "decoder_position_ids"):
                given.arguments.pop(name, None)
            output = model.run(model.stock, given, only)
            if arranged.gradients:
                total = loss_of(output) if given.labels is not None else None
                backward(_any(output) if total is None else total)
    except Exception as error:
        return said(error)
    if not arranged.packs:
        try:
            model.run(model.stock, asked, arranged)
        except Exception as error:
            return f"of the same call {said(error)}"
    return None


def _any(output: Any) -> torch.Tensor:
    return next(value for value in fields_of(output).values() if value.requires_grad).sum()
