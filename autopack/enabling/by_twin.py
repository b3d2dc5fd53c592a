"""Prove a model by its twin, tiny and on the CPU."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from autopack import errors, registry
from autopack.auditing.auditor import audited
from autopack.auditing.cases import FORMS, empty_images
from autopack.auditing.compare import OF_TWINS
from autopack.auditing.report import LeakReport, ModeResult
from autopack.auditing.running import left_as_found
from autopack.enabling.attach import attach, detach, examine
from autopack.errors import AutopackError
from autopack.inspection import releases
from autopack.inspection.code import ModelCode
from autopack.inspection.fingerprint import Fingerprint
from autopack.inspection.heads import row_head
from autopack.inspection.modules import device_of, entries, takes_tokens
from autopack.inspection.sharding import without_exchange
from autopack.proving import kept
from autopack.proving import twin as twins
from autopack.proving.apart import apart
from autopack.proving.kept import T
from autopack.proving.twin import NoTwin, Twin
from autopack.runtime.model import EnabledModel, Proof
from autopack.runtime.scope import stock

_OF_A_PRECISION = re.compile(r"^\w+(Error|Exception)\b|no numbers")
"""Reasons for which a call form is left out that stock may have in one precision alone: what it
raises, and NaN."""
_IMAGES = "pixel_values|flattened_patches"
_LENGTHS = (7, 11, 5)
"""Of the documents of an audit: one has neighbours on both sides, two have one between them.

Their sum is a prime, so that columns are not taken for heads or channels of that number.
"""


def proof_by_twin(enabled: EnabledModel, foreign: str | None) -> Proof:
    """Return the proof of a model by audits of its twin; raise `NoTwin` if that is impossible.

    The weights, the device and the gradients of the model have no part in it; no process waits for
    another one. `foreign` says what of its code is third-party, if any.
    """
    if foreign is not None and getattr(enabled.module.config, "chunk_size_feed_forward", 0) > 1:
        raise NoTwin(
            "its layers take some tokens at a time, and those of a twin one, beside which nothing "
            "is mixed",
        )

    def by_audits(precisions: tuple[torch.dtype, ...], device: str) -> Proof:
        """Return the proof by audits of twins in one precision after another; raise `NoTwin`."""
        answers: list[_Answer] = []
        failure = NoTwin()
        for dtype in precisions:
            modes = answers[0].unmeasured if answers else None
            try:
                answers.append(_audit_twin(enabled, dtype, device, modes, foreign is None))
            except NoTwin as error:
                failure = error
                continue
            if not answers[0].unmeasured:
                break
        if answers:
            return _proof_of_answers(answers, foreign, enabled.anatomy.causal)
        if isinstance(failure, _Raised) and foreign is None:  # calls of the model would raise too
            said = str(failure)
            return Proof(f"not, for {said}", said, said, said, source="twin")
        raise failure

    proof = ask_twins(enabled, ("proof", enabled.options.unpad), by_audits)
    # A twin is asked of text: labels that the family takes beside images alone have no answer
    # there.
    beside_images = foreign is None and "labels" in enabled.traits.refused_of_text
    return replace(proof, why_not_labels=None) if beside_images else proof


def ask_twins(enabled: EnabledModel, question: tuple[Any, ...], ask: Callable[..., T]) -> T:
    """Return `ask(dtypes, device)`, run `apart`, or the answer that is kept for the `question`.

    Answers about models whose code is all of libraries are kept.
    """
    precisions, implementations = precisions_of(enabled), enabled.implementations()
    backend = enabled.options.backend
    key = enabled.kind and (enabled.kind, question, backend, implementations, precisions)
    with without_exchange(implementations):
        return kept.answered(key, lambda: apart(lambda: ask(*precisions)))


def precisions_of(enabled: EnabledModel) -> tuple[tuple[torch.dtype, ...], str]:
    """Return the dtypes in which a twin is tried, in order, and the name of its device."""
    asked = enabled.implementations()
    flash = any(map(releases.is_flash, asked))
    if (
        flash or "flex_attention" in asked or enabled.options.backend == "flex"
    ) and torch.cuda.is_available():
        held = next(enabled.module.parameters(), None)  # a rank may hold none
        gpu = str(held.device) if held is not None and held.is_cuda else "cuda"
        if not flash:
            return (torch.float32,), gpu  # flex has a backward there alone
        # Its kernels run nowhere else, and in half precision: to which autocast brings a model in
        # another one.
        return (
            torch.float16 if held is not None and held.dtype == torch.float16 else torch.bfloat16,
        ), gpu
    return (torch.float64, torch.float32), "cpu"


class _Raised(NoTwin):
    """Error of a twin whose calls raise where stock runs."""


@dataclass
class _Answer:
    """Audit of a twin in one precision: its report, and the calls that autopack refused."""

    twin: Twin
    part: PreTrainedModel
    report: LeakReport
    refused: list[ModeResult]

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Call forms to try in another precision: all of them if gradients were not measured."""
        left_out = [
            name for name, reason in self.report.left_out.items() if _OF_A_PRECISION.search(reason)
        ]
        return tuple(FORMS if "gradients" in self.report.notes else left_out)


def _audit_twin(
    enabled: EnabledModel,
    dtype: torch.dtype,
    device: str,
    modes: tuple[str, ...] | None,
    is_own: bool,
) -> _Answer:
    """Return the audit of a twin in one precision; raise `NoTwin` if it cannot be audited.

    With `is_own`, library code alone, refused calls are kept apart.
    """
    twin = twins.of(enabled.module, dtype, device)
    parts_outside(twin)
    for module in twin.model.modules() if device == "cpu" else ():
        # some mixers insist on GPU kernels (Jamba, Zamba, up to transformers 4)
        if vars(module).get("use_fast_kernels") is True:
            module.use_fast_kernels = False  # type: ignore[assignment]
    try:
        with enabled_like(twin.model, enabled) as twin_enabled:
            part = callable_part(twin_enabled)
            report = audited(part, OF_TWINS[dtype], _LENGTHS, modes)
    except NoTwin:
        raise
    except Exception as error:  # a class may compute nothing at this size, or know no float64
        raise NoTwin(f"its twin raised {type(error).__name__}: {error}") from error
    for result in report.results:
        if result.failure is not None and not is_refusal(result.failure):
            raise _Raised(f"its twin raised {result.failure}")
    if not report.results:
        raise NoTwin("nothing of its twin can be compared with stock")
    refused = []
    if is_own:  # its code comes by a refusal in the user's call too, which says what to do
        refused = [result for result in report.results if result.failure is not None]
        report = replace(report, results=[r for r in report.results if r.failure is None])
    if report.results and not (
        math.isfinite(report.worst) and math.isfinite(report.worst_gradient)
    ):
        raise NoTwin("its twin gives what is no number")
    return _Answer(twin, part, report, refused)


def is_refusal(failure: str) -> bool:
    """Return True if the text of a failure begins with the name of an error of autopack."""
    found = getattr(errors, failure.partition(":")[0], None)
    return isinstance(found, type) and issubclass(found, AutopackError)


def _proof_of_answers(answers: list[_Answer], foreign: str | None, causal: bool) -> Proof:
    """Return the proof by audits of twins; later ones add call forms that the first left out."""
    first = answers[0]
    twin, report, outside = first.twin.model, first.report, parts_outside(first.twin)
    packed, labels, padded = (
        next(filter(None, (getattr(answer.report, kind) for answer in answers)), None)
        for kind in ("packed", "labels", "padded")
    )
    if not report.results:
        said = str(first.refused[0].failure)
        return Proof(
            f"not, for all calls of a tiny copy of it are refused: {said}",
            why_not_unpadded=said,
            source="twin",
        )
    count = sum(parameter.numel() for parameter in twin.parameters())
    how = (
        f"on a tiny copy of it ({count:,} parameters, {report.dtype}), worst relative error "
        f"{report.worst:.1e}"
    )
    if outside:
        how += f", but for {', '.join(outside)}: its calls are checked closely"
    if first.refused:
        how += f", refused: {', '.join(result.name for result in first.refused)}"
    said = "" if foreign is None else f" (it runs third-party code: {foreign})"
    inexact = padded or (None if _mixes_in_head_only(twin, report, causal) else packed)
    padded = (
        inexact and f"it was not exact without its padding when its twin was audited: {inexact}"
    )
    padded = why_padding_is_unknown(twin, first.part) or padded
    source = "part" if outside else "twin"
    left_out = sorted(set().union(*(answer.report.unattributed for answer in answers)))
    if left_out and first.part is not twin:  # code around a part may read it
        packed = (
            packed
            or f"nobody can tell which part of {', '.join(left_out)} belongs to which document"
        )
    packed = packed and f"{packed}{said}"
    return Proof(how + said, packed, labels, padded, source=source, leaves_out=tuple(left_out))


@contextlib.contextmanager
def enabled_like(
    model: PreTrainedModel, like: EnabledModel, **changed: Any
) -> Iterator[EnabledModel]:
    """Enable a twin in a block with the options of `like`, but for the `changed`; yield its state.

    Nothing else sees the twin, so nothing is kept.
    """
    family = registry.family_for(model)
    options = replace(
        like.options,
        **{"verify": False, "check_every": 0, "sequence_parallel": None, "share": False, **changed},
    )
    enabled = examine(model, family, options, _refuse_change)
    try:
        if set(like.implementations()) - set(enabled.implementations()):
            raise NoTwin(f"its twin attends by {', '.join(enabled.implementations())}")
        code = attach(enabled, family)
        enabled.proof = Proof("of a twin")
        enabled.fingerprint = Fingerprint(model, code, enabled.anatomy.configs)
        # transformers 4 puts forwards on layers when states are first asked for
        with enabled.settling():
            yield enabled
    finally:
        detach(enabled)


def _refuse_change(enabled: EnabledModel) -> None:
    """Raise `NoTwin`, as a twin that has changed is not examined again."""
    raise NoTwin("its twin has changed while it was audited")


def parts_outside(twin: Twin) -> list[str]:
    """Return class names of modules that a twin lacks; raise `NoTwin` if a model is among them.

    Raises `NoTwin` if one of them is a model.
    """
    for name, module in twin.others.items():
        if not name or isinstance(module, PreTrainedModel):
            raise NoTwin(f"{name or 'the model'} is not as its class makes it")
    return list(dict.fromkeys(type(module).__name__ for module in twin.others.values()))


def callable_part(enabled: EnabledModel) -> PreTrainedModel:
    """Return the outermost entry that takes `input_ids` alone, else the innermost entry."""
    nested = enabled.anatomy.entries
    for module in nested[:-1]:
        if _is_of_choices(module) or not takes_tokens(module):
            continue
        try:
            with left_as_found(module), stock(enabled), torch.no_grad():
                token = torch.zeros(1, 1, dtype=torch.long, device=device_of(module))
                module(input_ids=token, **empty_images(module, token))
                return module
        except Exception as error:
            # An encoder-decoder wants tokens for both halves: that is what the audit knows how to
            # give.
            missing = _IMAGES if isinstance(error, ValueError) else f"input_ids|{_IMAGES}"
            is_told = isinstance(error, TypeError | ValueError)
            if not (is_told and re.search(missing, str(error))):
                return module
    return nested[-1]


def why_padding_is_unknown(model: PreTrainedModel, tested: PreTrainedModel) -> str | None:
    """Return the reason why padding was not tested in a model's own forward; None if it was.

    Transformers' heads for choices make them the rows of a batch and read the first token of each.
    """
    if tested is model:
        return None
    own = _is_of_choices(model) and ModelCode(model).first_foreign(model) is None
    if own and any(tested is inner for inner in entries(model)[1:2]):
        summaries = {vars(module).get("summary_type", "first") for module in model.modules()}
        return (
            None
            if summaries == {"first"}
            else "its head reads others than the first token of a choice"
        )
    return f"nobody has seen what the forward of {type(model).__name__} does with padding"


def _mixes_in_head_only(model: PreTrainedModel, report: LeakReport, causal: bool) -> bool:
    """Return True if documents of packed rows meet in the head alone, not in the encoder.

    The encoder is transformers' own, so it can run padded batches without their padding and give
    the states back; the audit has seen that the head does with them what it does in stock. Who
    enables a `causal` model has packed rows in mind, and hears at once that they are not exact.
    """
    inner = entries(model)[1:2]
    if causal or not inner or not report.runs_without_padding:
        return False
    code = ModelCode(inner[0])
    return not code.foreign and code.hook is None


def _is_of_choices(module: PreTrainedModel) -> bool:
    """Return True if a model has a head that chooses between answers of a question."""
    head = row_head(module)
    return head is not None and head.of_choices
