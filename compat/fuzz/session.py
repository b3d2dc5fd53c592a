"""Run cases: a model is built once for the calls that share it, and once more as users enable it
where one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from autopack.errors import AutopackError
from compat.common import said
from compat.exactness import stand_in
from compat.fuzz.case import Arranged, Case, Spec
from compat.fuzz.judge import Verdict, judge
from compat.fuzz.model import Model, NoStock


def run_build(spec: Spec, calls: Sequence[Arranged]) -> Iterator[tuple[Case, Verdict]]:
    """The cases of one model with their verdicts, up to the first that fails; one where there is no
    model to call.

    As in compat/cells.py a model is served by its structure first; what is silent or crashes then
    is run again, alone and behind the calls before it, on a model that is enabled as users do it,
    with its audit. This one counts."""
    with kernels(spec):
        model, verdict = enabled(spec)
        for number, call in enumerate(calls):
            case = Case(spec, call)
            if model is not None:
                verdict = judge(model, call)
            if verdict.bad:
                verdict = run_case(case)
                if not verdict.bad:
                    case = Case(spec, call, tuple(calls[:number]))
                    verdict = run_case(case)
            yield case, verdict
            if model is None or verdict.bad:
                return


def run_case(case: Case, verify: bool = True) -> Verdict:
    """The verdict of one case by itself, on a model that is enabled with the audit or without."""
    with kernels(case.spec):
        model, verdict = enabled(case.spec, verify)
        if model is not None:
            for call in (*case.before, case.call):
                verdict = judge(model, call)
        return verdict


@contextlib.contextmanager
def kernels(spec: Spec) -> Iterator[None]:
    """What stands in on a CPU for the kernels that a model is to run."""
    with contextlib.ExitStack() as stack:
        for name in {spec.implementation, spec.backend} & {"flash", "flex"}:
            stack.enter_context(stand_in(name, **({"broadcast": True} if name == "flex" else {})))
        yield


def enabled(spec: Spec, verify: bool = False) -> tuple[Model | None, Verdict]:
    """A model, or the verdict on all of its calls."""
    try:
        return Model(spec, verify), Verdict("exact")
    except NoStock as error:
        return None, Verdict("no stock", str(error))
    except AutopackError as error:
        return None, Verdict("refused", said(error))
    except Exception as error:
        return None, Verdict("crash", f"enable: {said(error)}")
