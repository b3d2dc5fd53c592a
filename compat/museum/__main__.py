"""Show the auditor every exhibit of the museum, and record what it says.

    python -m compat.museum [NAME ...]    print a line for each exhibit, or for those named
    python -m compat.museum --record      also write compat/results/museum.json, the table of docs/leaks.md, its picture
    python -m compat.museum --check       run nothing; tell whether all exhibits are recorded, and the page is of today

The exit status is 1 where a mistake is not found, a sound twin raises an alarm, or an enabled model
is not exact."""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from compat.common import packages, quietly, write_json
from compat.matrix import ROOT
from compat.museum import page
from compat.museum.exhibit import names
from compat.museum.measure import Outcome, measured, objection

RECORD = ROOT / "compat" / "results" / "museum.json"


def recorded() -> dict[str, Outcome]:
    """Return the recorded outcomes by the exhibits' names."""
    found: dict[str, Outcome] = json.loads(RECORD.read_text(encoding="utf-8"))["exhibits"]
    return found


def stale(record: dict[str, Outcome], path: Path) -> list[str]:
    """Return what is not up to date, in words."""
    wanted, said = names(), []
    missing = [name for name in wanted if name not in record]
    gone = [name for name in record if name not in wanted]
    said += [f"{name}: not recorded" for name in missing]
    said += [f"{name}: recorded, and no exhibit" for name in gone]
    said += [
        f"{name}: {why}"
        for name in record
        if name in wanted and (why := objection(name, record[name]))
    ]
    if (
        not (missing or gone)
        and page.written(text := path.read_text(encoding="utf-8"), record) != text
    ):
        said.append(f"{path.name} is not what the record gives")
    return said


def _of(name: str) -> tuple[Outcome, float]:
    start = time.perf_counter()
    with quietly():
        return measured(name), time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; return 1 if something is not as it has to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of an exhibit, such as models.mask_of_ones"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the record, the page and its picture"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare the record and the page, and run nothing"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that run at a time")
    asked = parser.parse_args(arguments)
    unknown = set(asked.names) - set(names())
    if unknown:
        parser.error(
            f"NAME must be one of {', '.join(names())}; found {', '.join(sorted(unknown))}"
        )
    if asked.record and asked.names:
        parser.error("--record wants all exhibits; found some by name")
    if asked.check:
        said = stale(recorded(), page.PAGE)
        print(
            "\n".join(
                [*said, "Run `python -m compat.museum --record`."] if said else ["up to date"]
            )
        )
        return int(bool(said))
    chosen, outcomes, wrong = asked.names or names(), {}, 0
    with ProcessPoolExecutor(asked.jobs) as pool:
        for name, (outcome, seconds) in zip(chosen, pool.map(_of, chosen), strict=True):
            outcomes[name], why = outcome, objection(name, outcome)
            wrong += why is not None
            verdict = f"WRONG: {why}" if why else outcome["found"] or "not found, as it says"
            print(
                f"{name:44} {verdict:44} {outcome.get('enabled', ''):26} {seconds:5.1f} s",
                flush=True,
            )
    if asked.record and not wrong:
        from compat.museum.picture import draw  # matplotlib is wanted here alone

        text = {"with": packages(), "exhibits": outcomes}
        write_json(RECORD, text)
        page.PAGE.write_text(
            page.written(page.PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8"
        )
        draw()
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
