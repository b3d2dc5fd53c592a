"""Fuzz autopack: random models, configurations, layouts and forms of calls, against the stock
model.

    python -m compat.fuzz --models 2000 --seed 3      so many models, each with some calls
    python -m compat.fuzz --types llama gemma3_text   of some types
    python -m compat.fuzz --case '{"spec": ...}'      one case again, by the JSON that a failure prints

The verdicts are those of compat/fuzz/judge.py: `silent` and `crash` are failures, for which the
exit status is 1. hypothesis draws the cases, ends at the first failure, makes it smaller, and
prints it."""

from __future__ import annotations

import json
from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tqdm import tqdm

from autopack import tiny
from compat import matrix, study
from compat.common import packages, quietly, short, write_json
from compat.fuzz import draw, session
from compat.fuzz.case import Case, Spec, of_json
from compat.fuzz.judge import STATUSES, Verdict

_CALLS = 24
"""The most calls of one model."""


class Failed(AssertionError):
    """A case has failed."""

    def __init__(self, case: Case, verdict: Verdict):
        super().__init__(verdict.reason)
        self.case, self.verdict = case, verdict


class Run:
    """What came out of some cases."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.types: set[tuple[str, str]] = set()
        self.failures: list[Failed] = []

    def fuzz(self, models: int, types: frozenset[str]) -> None:
        """Draw models and calls of them, until one fails."""
        asked = settings(
            max_examples=models,
            derandomize=False,  # the seed draws, in tests too
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        with tqdm(total=models, unit=" models", mininterval=2, disable=None) as bar:

            @hypothesis.seed(self.seed)
            @asked
            @hypothesis.given(st.data())
            def build(data: st.DataObject) -> None:
                try:
                    spec = data.draw(draw.specs(types))
                except tiny.CannotBuild as error:
                    self.count(Spec(error.model_type), Verdict("no stock", error.reason))
                    return
                calls = st.lists(draw.calls(spec), min_size=1, max_size=_CALLS)
                calls |= st.lists(draw.calls(spec), min_size=_CALLS // 2, max_size=_CALLS)
                for case, verdict in session.run_build(spec, data.draw(calls)):
                    self.count(spec, verdict)
                    if verdict.bad:
                        raise Failed(case, verdict)
                bar.update()

            try:
                build()
            except Failed as failure:
                self.failures.append(failure)

    def count(self, spec: Spec, verdict: Verdict) -> None:
        """Count a verdict."""
        self.counts[verdict.status] += 1
        self.types.add((spec.task, spec.model_type))
        if verdict.status not in ("exact", "silent", "crash"):
            self.reasons[verdict.status, short(verdict.reason)] += 1

    def to_dict(self) -> dict[str, object]:
        """What is recorded."""
        return {
            "with": packages(),
            "seed": self.seed,
            "cases": sum(self.counts.values()),
            "counts": {status: self.counts[status] for status in STATUSES},
            "types": len(self.types),
            "reasons": [[status, reason, n] for (status, reason), n in self.reasons.most_common()],
            "failures": [
                {
                    "case": json.loads(each.case.to_json()),
                    "status": each.verdict.status,
                    "reason": each.verdict.reason,
                }
                for each in self.failures
            ],
        }


@quietly()
def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are asked for; 1 where one is silent or crashes."""
    parser = study.parser_of(__doc__)
    parser.add_argument(
        "--models", type=int, default=100, help="how many models are drawn (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", default=[], help="model types (default: all)")
    parser.add_argument("--case", metavar="JSON", help="run this case alone")
    parser.add_argument("--record", action="store_true", help="record counts, reasons, failures")
    asked = parser.parse_args(arguments)
    unknown = set(asked.types) - {name for task in tiny.TASKS for name in tiny.types_for(task)}
    if unknown:
        parser.error(f"no model types of the installed transformers: {', '.join(sorted(unknown))}")
    run = Run(asked.seed)
    if asked.case is None:
        run.fuzz(asked.models, frozenset(asked.types))
    else:
        try:
            case = of_json(asked.case)
        except ValueError as error:
            parser.error(str(error))
        verdict = session.run_case(case)
        run.count(case.spec, verdict)
        run.failures += [Failed(case, verdict)] if verdict.bad else []
    found = run.to_dict()
    for each in run.failures:
        print(f"\n{each.verdict.status}: {each.verdict.reason}\n{each.case.to_json()}\n")
    for (status, why), n in run.reasons.most_common(24):
        print(f"  {status:<9}{n:>6}  {why}")
    counted = ", ".join(f"{n} {status}" for status, n in run.counts.items())
    print(f"{found['cases']} cases of {found['types']} types and tasks: {counted}.")
    if asked.record:
        write_json(matrix.RESULTS / "fuzz.json", found)
    return 1 if run.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
