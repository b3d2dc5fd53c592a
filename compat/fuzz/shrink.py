"""Make a failing case smaller, one change at a time, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from compat.fuzz.case import Arranged, Case, Spec
from compat.fuzz.draw import OF_ROWS, filled
from compat.fuzz.judge import Verdict

_ATTEMPTS = 150
_FORM = ("collator", "form", "positional", "use_cache", "checkpointing", "gradients", "labels", "training", "offset")
_MODEL = ("backend", "unpad", "experts", "ignored", "outputs", "implementation", "dtype")


def shrunk(case: Case, verdict: Verdict, run: Callable[[Case], Verdict]) -> tuple[Case, Verdict]:
    """The smallest case that is found, and its verdict, which has the same status.

    Documents are dropped and shortened, changes of the configuration taken back and the form of the call made plain.
    `run` judges a case.
    """
    left, progress = _ATTEMPTS, True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(case):
            left -= 1
            found = run(smaller)
            if found.status == verdict.status and _kind(found) == _kind(verdict):
                case, verdict, progress = smaller, found, True
                break
            if left <= 0:
                break
    return case, verdict


def _kind(verdict: Verdict) -> str:
    """Of a crash the type of the error; other numbers are other numbers wherever they are."""
    return verdict.reason.partition(":")[0] if verdict.status == "crash" else ""


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are one step smaller, the largest steps first."""
    spec, call = case.spec, case.call
    one_less = (_without(case.before, number) for number in range(len(case.before)))
    for kept in ((), case.before[len(case.before) // 2 :], *one_less):
        if len(kept) < len(case.before):
            yield replace(case, before=kept)
    if not case.before:
        for fewer in _fewer(call.rows):
            yield replace(case, call=replace(call, rows=filled(fewer, spec.lengths)))
        yield from _renumbered(case)
    for number in range(len(spec.changes)):
        yield replace(case, spec=replace(spec, changes=_without(spec.changes, number)))
    names = (*_FORM, "mask") if spec.task not in OF_ROWS else _FORM
    for plainer in _plain(call, Arranged(), names):
        if spec.task in OF_ROWS and plainer.form in ("positions", "cu_seqlens", "seq_idx"):
            plainer = replace(plainer, mask=True)
        if plainer != call:
            yield replace(case, call=plainer)
    yield from (replace(case, spec=plainer) for plainer in _plain(spec, Spec(spec.model_type), _MODEL))
    if not case.before:
        for number, length in enumerate(spec.lengths):
            for shorter in dict.fromkeys((1, length // 2, length - 1)):
                if 0 < shorter < length:
                    lengths = (*spec.lengths[:number], shorter, *spec.lengths[number + 1 :])
                    rows = filled((_tight(row) for row in call.rows), lengths)
                    yield replace(case, spec=replace(spec, lengths=lengths), call=replace(call, rows=rows))


def _fewer(rows: tuple[tuple[int, ...], ...]) -> Iterator[list[tuple[int, ...]]]:
    """Fewer rows, fewer documents in a row, less padding."""
    if len(rows) > 1:
        yield from ([*_without(rows, number)] for number in range(len(rows)))
    for place, row in enumerate(rows):
        for number in range(len(row)):
            fewer = _without(row, number)
            if any(entry >= 0 for entry in fewer):
                yield [_tight(other) if at != place else fewer for at, other in enumerate(rows)]
            if row[number] < -1:
                one = (*row[:number], -1, *row[number + 1 :])
                yield [_tight(other) if at != place else one for at, other in enumerate(rows)]


def _tight(row: tuple[int, ...]) -> tuple[int, ...]:
    """A row without the padding behind it, which is made anew."""
    return row[:-1] if len(row) > 1 and row[-1] < 0 else row


def _renumbered(case: Case) -> Iterator[Case]:
    """Only the documents that are called for, in the order in which they are."""
    used = list(dict.fromkeys(case.call.picks))
    if used != list(range(len(case.spec.lengths))):
        place = {number: at for at, number in enumerate(used)}
        rows = tuple(tuple(place.get(number, number) for number in row) for row in case.call.rows)
        lengths = tuple(case.spec.lengths[number] for number in used)
        yield replace(case, spec=replace(case.spec, lengths=lengths), call=replace(case.call, rows=rows))


def _plain(found: Any, plainest: Any, names: tuple[str, ...]) -> Iterator[Any]:
    known = {field.name for field in fields(found)}
    for name in names:
        assert name in known, name
        if getattr(found, name) != getattr(plainest, name):
            yield replace(found, **{name: getattr(plainest, name)})


def _without(values: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return (*values[:number], *values[number + 1 :])
