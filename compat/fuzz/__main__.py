"""Fuzz autopack: random models, configurations, layouts and forms of calls, against the stock model.

    python -m compat.fuzz --seconds 480 --seed 3      as many cases of a seed as there is time for
    python -m compat.fuzz --cases 50000               the first cases of seed 0
    python -m compat.fuzz --types llama gemma3_text   the builds of some types
    python -m compat.fuzz --case 3:1207               one case again, by its number
    python -m compat.fuzz --case '{"spec": ...}'      one case again, by the JSON that a failure prints

Case k of a seed is the same whatever ran before it. The verdicts are those of compat/fuzz/judge.py: `silent` and
`crash` are failures, for which the exit status is 1; each is made smaller and printed as Python and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from autopack import tiny
from compat.cells import short
from compat.fuzz import session
from compat.fuzz.case import Case, of_json
from compat.fuzz.judge import STATUSES, Verdict
from compat.fuzz.shrink import shrunk
from compat.fuzz.snippet import snippet
from compat.reliability import packages


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """On one thread, without warnings and log lines."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    disabled = logging.root.manager.disable
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        logging.disable(disabled)


@_quietly()
def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are asked for; 1 where one is silent or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="end after this time (default: 60, where no --cases are given)")
    parser.add_argument("--cases", type=int, help="end after this many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", nargs="+", default=[], help="model types (default: all)")
    parser.add_argument("--case", help="SEED:NUMBER, or the JSON of a case")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts, reasons and failures there")
    asked = parser.parse_args(arguments)
    unknown = set(asked.types) - {name for task in tiny.TASKS for name in tiny.types_for(task)}
    if unknown:
        parser.error(f"no model types of the installed transformers: {', '.join(sorted(unknown))}")
    run = Run(shrink=not asked.no_shrink)
    if asked.case is None:
        seconds = asked.seconds if asked.seconds is not None or asked.cases is not None else 60.0
        run.fuzz(asked.seed, seconds, asked.cases, frozenset(asked.types))
    else:
        try:
            case = _case(asked.case)
        except ValueError as error:
            parser.error(str(error))
        run.take(case, session.run_case(case))
    print(run.summary())
    if asked.json is not None:
        asked.json.write_text(json.dumps(run.to_dict(), indent=1) + "\n")
    return 1 if run.failures else 0


class Run:
    """What came out of some cases."""

    def __init__(self, shrink: bool):
        self.shrink = shrink
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.types: set[tuple[str, str]] = set()
        self.failures: list[tuple[Case, Verdict]] = []
        self.kinds: dict[tuple[str, str, str], str] = {}
        """The first case that failed of a type, task and status; the others are not made smaller."""
        self.seconds = 0.0
        self.seed: int | None = None

    def fuzz(self, seed: int, seconds: float | None, cases: int | None, types: frozenset[str]) -> None:
        """Run the builds of a seed one after the other, until the time or the number of cases is reached."""
        started, build, self.seed = time.monotonic(), 0, seed
        with tqdm(total=cases, unit=" cases", mininterval=2, file=sys.stderr) as bar:
            while True:
                for case, verdict in session.run_build(seed, build, types):
                    self.take(case, verdict)
                    bar.update()
                    self.seconds = time.monotonic() - started
                    if cases is not None and sum(self.counts.values()) >= cases:
                        return
                    if seconds is not None and self.seconds >= seconds:
                        return
                bar.set_postfix(dict(self.counts), refresh=False)
                build += 1

    def take(self, case: Case, verdict: Verdict) -> None:
        """Count a verdict; make a failing case smaller, and print it."""
        self.counts[verdict.status] += 1
        self.types.add((case.spec.task, case.spec.model_type))
        if verdict.bad:
            self._fail(case, verdict)
        elif verdict.status != "exact":
            self.reasons[verdict.status, short(verdict.reason)] += 1

    def _fail(self, case: Case, verdict: Verdict) -> None:
        kind = case.spec.model_type, case.spec.task, verdict.status
        known = self.kinds.setdefault(kind, case.name)
        if known != case.name:
            tqdm.write(f"{verdict.status}: case {case.name}, like case {known}: {verdict.reason}", sys.stdout)
            self.failures.append((case, verdict))
            return
        if self.shrink:
            smaller, _ = shrunk(case, verdict, partial(session.run_case, verify=False))
            found = session.run_case(smaller)  # as a user enables the model
            case, verdict = (smaller, found) if found.bad else (case, verdict)
        self.failures.append((case, verdict))
        tqdm.write(f"\n{verdict.status}: case {case.name}\n{_python(case, verdict)}\n{case.to_json()}\n", sys.stdout)
        sys.stdout.flush()

    def summary(self) -> str:
        """Counts, the commonest reasons of what is not exact, and how fast it went."""
        counted = ", ".join(f"{self.counts[status]} {status}" for status in STATUSES)
        lines = [f"{sum(self.counts.values())} cases of {len(self.types)} types and tasks: {counted}."]
        for status in ("refused", "no stock"):
            of_status = [(reason, n) for (each, reason), n in self.reasons.most_common() if each == status]
            lines += [f"  {status:<9}{n:>6}  {reason}" for reason, n in of_status[:12]]
        if self.seconds:
            rate = sum(self.counts.values()) / self.seconds
            lines.append(f"{rate:.1f} cases per second on one thread.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """The same as data."""
        return {
            "with": packages(),
            "seed": self.seed,
            "cases": sum(self.counts.values()),
            "counts": {status: self.counts[status] for status in STATUSES},
            "types": len(self.types),
            "reasons": [[status, reason, n] for (status, reason), n in self.reasons.most_common()],
            "failures": [
                {"case": json.loads(case.to_json()), "status": verdict.status, "reason": verdict.reason}
                for case, verdict in self.failures
            ],
        }


def _case(text: str) -> Case:
    numbered = re.fullmatch(r"(\d+):(\d+)", text)
    return session.case_of(int(numbered[1]), int(numbered[2])) if numbered else of_json(text)


def _python(case: Case, verdict: Verdict) -> str:
    try:
        return snippet(case, verdict)
    except Exception as error:  # what cannot be written as Python is still there as JSON
        return f"# {verdict.status}: {verdict.reason}\n# no Python for it: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
