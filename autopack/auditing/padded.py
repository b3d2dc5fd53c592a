"""Measure padded batches against stock's, and the losses of routers."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopack.auditing.asking import expected_losses
from autopack.auditing.cases import FORMS, ROUTER, Form, Input, NoReference
from autopack.auditing.compare import Arguments, relative_error
from autopack.auditing.fields import Sides, WrongShape, fields_of
from autopack.auditing.measuring import MADE_OF_LABELS, Measuring, Results, with_axes
from autopack.auditing.report import ModeResult
from autopack.auditing.running import run_as_stock
from autopack.calls.outputs import loss_of, parts_of
from autopack.errors import AutopackError


def padded(audit: Measuring, name: str, differentiate: bool) -> ModeResult:
    """Return a padded batch's result against stock; raise `NoReference` if stock cannot run it."""
    enabled, case = audit.enabled, audit.case
    assert enabled is not None, "padded batches of stock are stock's"
    call, form = case.call(FORMS[name]), FORMS[name]
    given = partial(_batch_arguments, audit, call, form)
    before, measured = (
        enabled.tally.batches,
        ModeResult(name, audit.model.training, kind="padded"),
    )
    try:
        output = audit.model(**given())
    except Exception as error:
        _reference(audit, given(), call.sides)  # stock may not run it either
        return replace(measured, failure=f"{type(error).__name__}: {error}")
    unpadded = enabled.tally.batches > before
    arguments = given(drops=unpadded)
    wanted = _reference(audit, arguments, call.sides)
    fields, of_stock = fields_of(output), fields_of(wanted)
    for field, value in of_stock.items():
        shape = tuple(fields[field].shape) if field in fields else None
        if shape != tuple(value.shape):
            said = f"{field} has shape {shape}; stock gives {tuple(value.shape)}"
            return replace(measured, failure=said)
    found = _results(output, call.sides)

    def against(expected: Results) -> ModeResult:
        """Return the result with errors of `found` relative to `expected`."""
        loss = None
        if expected.loss is not None:
            loss = math.inf if found.loss is None else relative_error(found.loss, expected.loss)
        errors = audit.errors(found, expected, differentiate, is_padded=True)
        return replace(measured, loss=loss, unpadded=unpadded, **errors)

    result = against(_results(wanted, call.sides))
    reads_padding = (
        enabled.traits.padding_matters
        # By flash kernels upstream lets a decoder see the padding of its encoder.
        or (case.is_pair and "flash" in audit.report.implementation)
        or enabled.anatomy.has_row_dependent_rotary
    )
    if reads_padding and not audit.report.is_exact(result):
        # Where tokens get something of what stands in padding, documents alone tell, and not
        # stock's batch.
        labels = None if loss_of(wanted) is None else audit.labels
        makes = case.is_pair and "decoder_input_ids" not in arguments
        more = MADE_OF_LABELS if makes else {}
        numbers = range(len(call.first))
        with suppress(WrongShape, NoReference):
            answers = (audit.one_alone(case, call, number, labels, **more) for number in numbers)
            alone, losses = zip(*answers, strict=True)
            _, documents, _ = call.sides.split(with_axes(of_stock), [*alone])
            loss = None if labels is None else expected_losses([*losses], labels.counts)[0]
            other = against(Results(documents, loss))
            if audit.report.is_exact(other):
                return other
    return result


def _batch_arguments(
    audit: Measuring, call: Input, form: Form, filler: int | None = None, drops: bool = False
) -> Arguments:
    """Return arguments of a padded batch in new tensors, with labels if the form has them.

    With `drops`, labels of tokens behind padding are ignored: autopack leaves these out, and stock
    compares them with what padding predicts."""
    case, labels = audit.case, audit.labels
    arguments = case.given(call, filler=filler) | case.without_router
    if labels is not None and form.labels:
        arguments |= labels.padded(call.sides, drops)
        if drops and labels.shifts:
            audit.report.notes["labels behind padding"] = (
                "compared with stock without the terms in which it scores them by what it "
                "predicts at padding"
            )
        if form.labels == "tokens" and labels.per_token:
            arguments = {n: v for n, v in arguments.items() if not n.startswith("decoder_")}
    return arguments


def _reference(audit: Measuring, arguments: Arguments, sides: Sides) -> Any:
    """Return stock's output for a padded batch; raise `NoReference` if it raises or gives NaN."""
    try:
        output = run_as_stock(audit.model, arguments)
    except Exception as error:
        raise NoReference(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    documents = _results(output, sides).documents
    if any(bool(value.isnan().any()) for each in documents for value in each.values()):
        raise NoReference("stock gives values that are no numbers")
    return output


def _results(output: Any, sides: Sides) -> Results:
    """Return an output's loss, and its documents' parts of fields, indivisible ones whole."""
    parts = {name: sides.parts(name, value) for name, value in fields_of(output).items()}
    documents = [
        {name: each[number] for name, each in parts.items()} for number in range(sides.count)
    ]
    return Results(documents, loss_of(output))


@torch.no_grad()
def routers(audit: Measuring) -> ModeResult:
    """Return the result of router losses, and other single numbers, of packed rows against stock's.

    That is the reference, since a router is balanced over all tokens of a batch, so documents alone
    say nothing of it. Raise `NoReference` if stock counts padding in these losses.
    """
    case, labels, model, form = audit.case, audit.labels, audit.model, FORMS[ROUTER]
    if labels is None:
        raise NoReference("there are no labels that its loss takes")
    batch = case.call(form)
    wanted: Arguments = {"output_router_logits": True}
    given, other = (
        _batch_arguments(audit, batch, form, filler) | wanted
        for filler in (None, case.other_filler)
    )
    try:
        expected, changed = (_numbers(run_as_stock(model, each)) for each in (given, other))
    except Exception as error:
        raise NoReference(f"stock raises {type(error).__name__} for the padded batch") from error
    if not expected or not all(map(torch.isfinite, expected.values())):
        raise NoReference("stock gives no numbers for the loss of the padded batch")
    if _error(changed, expected) > 1e-6:
        raise NoReference("stock counts padding in it, so that a padded batch says nothing")
    calls = (case.call(FORMS[each]) for each in ("default", "padding mask"))
    packed = [case.given(call) | labels.packed(call) | wanted for call in calls]
    result, worst = ModeResult(ROUTER, model.training, error=None), 0.0
    for arguments in (*packed, given):
        try:
            worst = max(worst, _error(_numbers(model(**arguments)), expected))
        except AutopackError as failure:
            result = replace(result, loss_refused=f"{type(failure).__name__}: {failure}")
        except Exception as failure:
            return replace(result, failure=f"{type(failure).__name__}: {failure}")
    return replace(result, loss=worst)


def _numbers(output: Any) -> dict[Any, Tensor]:
    """Return an output's loss and its other floating tensors without axes, by name."""
    parts = {**parts_of(output), "loss": loss_of(output)}
    return {
        name: value
        for name, value in parts.items()
        if isinstance(value, Tensor) and not value.dim() and value.is_floating_point()
    }


def _error(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> float:
    """Return the largest relative error of some numbers; infinite if one is missing."""
    return max(
        relative_error(found[name], value) if name in found else math.inf
        for name, value in expected.items()
    )
