"""What becomes of a model that is enabled and audited: the one question that the tables of compat
ask.

`compat.cells` asks it of the plain `enable(model)`, as users call it; `compat.exactness` with
`verify=False`, so that its rows say what packing gives.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

import autopack
from autopack import errors, tiny
from autopack.auditing.asking import argument_names
from autopack.auditing.cases import FORMS, Case
from autopack.auditing.fields import fields_of
from autopack.errors import AutopackError, LeakDetected
from autopack.inspection.heads import end_token, row_head
from autopack.inspection.modules import is_pair
from compat.common import said

REFUSALS = tuple(
    name
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, AutopackError)
)
"""Names of autopack's errors, with which the message of a refused call begins."""
_LENGTHS = (13, 6)
"""Documents that stock is asked for alone: on both sides of the thresholds that `compat.variants`
sets."""


@dataclass(frozen=True)
class Outcome:
    """`status` is exact, refused, LEAK, crash or upstream error, with the `reason` where it is not
    exact.

    The report of the audit and the handle are there as far as it came.
    """

    status: str
    reason: str | None
    report: Any
    handle: Any


def outcome(model: Any, *, audit: dict[str, Any], **enable: Any) -> Outcome:
    """Enable a model and audit it, with these options; of what is served and not exact, stock is
    asked, too.

    A model that stock does not run itself has an `upstream error`, and is no longer enabled. Of one
    that `enable` refuses, stock is not asked: it may take more than tokens."""
    handle = report = None
    try:
        handle = autopack.enable(model, **enable)
        if handle.enabled.proof.source in ("checks", "part"):
            _call_once(model, handle)
        report = autopack.audit(model, **audit)
    except AutopackError as error:
        return Outcome("refused", reason_of(error), None, handle)
    except Exception as error:  # whatever autopack did not mean to raise is a result
        status, reason = "crash", said(error)
    else:
        if report.exact:
            return Outcome("exact", None, report, handle)
        failures = [result.failure for result in report.results if result.failure is not None]
        if failures and all(failure.startswith(REFUSALS) for failure in failures):
            status, reason = "refused", failures[0]
        else:
            status, reason = "crash" if failures else "LEAK", report.worst_case
    upstream = upstream_error(model, handle)
    return Outcome(
        *((status, reason) if upstream is None else ("upstream error", upstream)), report, handle
    )


def _call_once(model: Any, handle: Any) -> None:
    """Call a model once as users do in each way that nothing but checks of calls judges, which an
    audit has none of.

    Padded batches are left from then on where their first one differs. Packed rows raise
    `LeakDetected`. Where those with labels alone do, they are refused from then on."""
    case, trained, enabled = Case(model, _LENGTHS, 0), model.training, handle.enabled
    read, enabled.padding_read = enabled.padding_read, None
    if enabled.proof.source == "checks":
        options = {"use_cache": False} if "use_cache" in argument_names(model) else {}
        for trains, side, labelled in itertools.product(
            (False, True), ("right", "left"), (False, True)
        ):
            batch = case.given(case.call(FORMS[f"{side}-padded"]))
            given = options | (_labels_of(batch) if labelled else {})
            # the audit says what raises
            with contextlib.suppress(Exception), torch.set_grad_enabled(trains):
                model.train(trains)(**batch, **given)
    packed = case.given(case.call(FORMS["default"]))
    for given in ({}, _labels_of(packed)):
        try:
            model.train()(**packed, **given)
        except LeakDetected as leak:
            if not given:
                raise
            enabled.proof = replace(enabled.proof, why_not_labels=str(leak.report))
        except Exception:
            continue  # the audit says so
    enabled.padding_read = read
    model.train(trained)


def _labels_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The tokens of a call as its labels, but for those of padding."""
    prefix = "decoder_" if "decoder_input_ids" in arguments else ""
    ids, mask = arguments[f"{prefix}input_ids"], arguments.get(f"{prefix}attention_mask")
    return {"labels": ids if mask is None else ids.masked_fill(mask == 0, -100)}


def upstream_error(model: Any, handle: Any = None) -> str | None:
    """What stock transformers raises for any of the documents alone, or what is no result; None
    where it works.

    Of a model that takes no tokens it says nothing: the question would be wrong, not the answer.
    """
    if handle is not None:
        handle.remove()
    names, end = argument_names(model), end_token(model)
    if "input_ids" not in names:
        return None
    try:
        for length in _LENGTHS:
            ids = tiny.tokens(model.config, 1, length)
            if end is not None:
                ids[:, -1] = end
            tokens = {"input_ids": ids}
            # others make the decoder's tokens of these
            if is_pair(model) and row_head(model) is None:
                tokens["decoder_input_ids"] = ids
            with torch.no_grad():
                # with the cache that is the default, as the audit calls it too
                output = model(**tokens)
            output = model(**tokens, **({"use_cache": False} if "use_cache" in names else {}))
            if not all(t.isfinite().all() for t in output.values() if isinstance(t, torch.Tensor)):
                return "its results for a document alone are not finite"
            results = next(iter(fields_of(output).values()))  # the first that belongs to rows
            if float(results.detach().std()) == 0:
                return "its results for a document alone are all the same number"
            if results.requires_grad:
                results.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        model.zero_grad(set_to_none=True)
    return None


def reason_of(error: AutopackError) -> str:
    """Why `enable` refused a model, without what its message says around that."""
    return error.message.split("cannot be packed exactly: ")[-1].split(". Nothing was changed")[0]
