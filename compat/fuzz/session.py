"""Run cases one after the other: a model is built once for those that share it, and looked at again where one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from autopack import tiny
from autopack.errors import AutopackError
from compat.exactness import stand_in
from compat.fuzz import draw
from compat.fuzz.case import Arranged, Case, Spec
from compat.fuzz.judge import Verdict, judge
from compat.fuzz.model import Model, NoStock, said


def run_build(seed: int, build: int, types: frozenset[str] = frozenset()) -> Iterator[tuple[Case, Verdict]]:
    """The cases of one build with their verdicts; a single one where there is no model to call."""
    try:
        spec = draw.spec_of(seed, build, types)
    except tiny.CannotBuild as error:
        spec = Spec(error.model_type)
        yield Case(spec, Arranged(), name=_name(seed, build, 0)), Verdict("no stock", error.reason)
        return
    if spec is None:
        return
    with kernels(spec):
        model, verdict = _enabled(spec)
        earlier: list[Arranged] = []
        for number in range(draw.PER_BUILD):
            call = draw.call_of(seed, build, number, spec)
            case = Case(spec, call, name=_name(seed, build, number))
            if model is None:
                yield case, verdict
                return
            verdict = judge(model, call)
            if verdict.bad:
                case, verdict = _again(case, verdict, earlier)
                refused, why = _enabled(spec, True) if verdict.status == "refused" else (model, verdict)
                model, earlier = _enabled(spec)[0] if refused is not None else None, []
                if model is None:  # no user can have it, so nothing that it does otherwise counts
                    yield case, why
                    return
            else:
                earlier.append(call)
            yield case, verdict


def run_case(case: Case, verify: bool | None = None) -> Verdict:
    """The verdict of one case by itself.

    As in compat/cells.py a model is served by its structure first; where that is silent or crashes it is enabled as
    users do it, with the audit that comes with that, and this one counts. `verify` asks for one of the two alone.
    """
    with kernels(case.spec):
        verdict = Verdict("exact")
        for how in (False, True) if verify is None else (verify,):
            model, verdict = _enabled(case.spec, how)
            if model is not None:
                for call in case.before:
                    judge(model, call)
                verdict = judge(model, case.call)
            if not verdict.bad:
                break
        return verdict


def case_of(seed: int, number: int) -> Case:
    """Case `number` of a seed; raises `tiny.CannotBuild` where stock has no such model with its tiny configuration."""
    build, place = divmod(number, draw.PER_BUILD)
    spec = draw.spec_of(seed, build)
    assert spec is not None, "no types were asked for"
    return Case(spec, draw.call_of(seed, build, place, spec), name=_name(seed, build, place))


@contextlib.contextmanager
def kernels(spec: Spec) -> Iterator[None]:
    """What stands in on a CPU for the kernels that a model is to run."""
    with contextlib.ExitStack() as stack:
        for name in {spec.implementation, spec.backend} & {"flash", "flex"}:
            stack.enter_context(stand_in(name, **({"broadcast": True} if name == "flex" else {})))
        yield


def _enabled(spec: Spec, verify: bool = False) -> tuple[Model | None, Verdict]:
    try:
        return Model(spec, verify), Verdict("exact")
    except NoStock as error:
        return None, Verdict("no stock", str(error))
    except AutopackError as error:
        return None, Verdict("refused", said(error))
    except Exception as error:
        return None, Verdict("crash", f"enable: {said(error)}")


def _again(case: Case, verdict: Verdict, earlier: list[Arranged]) -> tuple[Case, Verdict]:
    """A case that failed, in a model of its own; with the calls before it where it fails after those alone."""
    fresh = run_case(case)
    if fresh.bad or run_case(case, verify=False).bad:
        return case, fresh
    after = replace(case, before=tuple(earlier))
    found = run_case(after)
    if found.bad or found.status == "refused":
        return after, found
    return after, replace(verdict, reason=f"{verdict.reason} (not when it was run again)")


def _name(seed: int, build: int, place: int) -> str:
    return f"{seed}:{build * draw.PER_BUILD + place}"
