"""The one command of all studies: cells are chosen, measured, printed, recorded, and shown on pages.

    python -m compat.NAME                 measure all cells of a study
    python -m compat.NAME WORD ...        those of which it is the name or a word of it, or else those that contain it
    python -m compat.NAME --record        also put them among those in compat/results, and write their pages
    python -m compat.NAME --check         run nothing; tell what is wrong in the record, and which page is old
    python -m compat.NAME --pages         run nothing; write the pages of the record

The exit status is 1 where something is wrong. A study is a module with a `STUDY`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compat import matrix
from compat.common import packages, quietly, write_json

Verdict = dict[str, Any]
Cells = dict[str, Verdict]
"""What became of cells, by their names."""


def bad_status(name: str, verdict: Verdict) -> str | None:
    """A status in capitals, or a crash."""
    status = str(verdict["status"])
    return status if status.isupper() or status == "crash" else None


@dataclass(frozen=True)
class Study:
    """A question, and the cells that it is asked of."""

    name: str
    """Of its record."""
    about: str
    cells: Callable[[], Iterable[str]]
    measure: Callable[[list[str], argparse.Namespace], Iterable[tuple[str, Verdict]]]
    """Yields cells with their verdicts."""
    wrong: Callable[[str, Verdict], str | None] = bad_status
    """What is wrong with the verdict of a cell."""
    versions: Callable[[], Mapping[str, str]] = packages
    """Of what a record is made with."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the command beside those of all studies, as argparse takes them."""
    pages: Callable[[Cells], Mapping[Path, str]] = lambda cells: {}
    """Pages that the record makes."""

    @property
    def path(self) -> Path:
        """Where it is recorded."""
        return matrix.RESULTS / f"{self.name}.json"

    def recorded(self) -> Cells:
        """The cells that are recorded."""
        return recorded(self.name).get("cells", {})

    def record(self, found: Cells) -> None:
        """Put cells among the recorded ones, and write the pages."""
        known = self.recorded() | found
        cells = {name: known[name] for name in self.cells() if name in known}
        write_json(self.path, {"with": dict(self.versions()), "cells": cells}, depth=3)
        settle(self.pages(cells))

    def stale(self) -> list[str]:
        """What is wrong in the record, and what is not up to date, in words."""
        cells, names = self.recorded(), set(self.cells())
        said = [f"{name}: not recorded" for name in self.cells() if name not in cells]
        said += [f"{name}: recorded, and no cell" for name in cells if name not in names]
        of = {name: self.wrong(name, cells[name]) for name in cells if name in names}
        said += [f"{name}: {why}" for name, why in of.items() if why]
        return said or settle(self.pages(cells), check=True)


def recorded(name: str) -> dict[str, Any]:
    """The record of a study: its cells, and `with` which packages they were measured."""
    path = matrix.RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def settle(pages: Mapping[Path, str], check: bool = False) -> list[str]:
    """Write the pages that say something else than they have to, or with `check` tell which do."""
    old = {
        path: text
        for path, text in pages.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    if not check:
        for path, text in old.items():
            path.write_text(text, encoding="utf-8")
    return [f"{path.name} is not what the records give" for path in old]


def between(text: str, first: str, last: str, part: Callable[[], str]) -> str:
    """A text with a `part` between the line `first` and `last`. Raises `ValueError` where the text has
    not both once."""
    if text.count(f"{first}\n") != 1 or text.count(last) != 1:
        raise ValueError(f"a page wants the two lines {first!r} and {last!r} once")
    before, _, rest = text.partition(f"{first}\n")
    return f"{before}{first}\n{part()}\n{last}{rest.partition(last)[2]}"


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a module as it is."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=form)


def write_pages(
    about: str | None, pages: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None
) -> int:
    """The command of pages that are made of records: it writes them, or with --check tells."""
    parser = parser_of(about)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where one is old")
    check = parser.parse_args(arguments).check
    said = settle(pages(), check)
    return told(said) if check else 0


def told(said: list[str]) -> int:
    """Print what is not as it has to be, and return the exit status."""
    print("\n".join(said or ["up to date"]))
    return int(bool(said))


def chosen(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """The names that are words, or else those that contain one; all where there are no words."""
    names = list(names)
    same = [name for name in names if {name, *re.split("[ /:]+", name)} & {*words}]
    return same or [name for name in names if not words or any(word in name for word in words)]


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks of a study."""
    parser = parser_of(study.about)
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names of cells")
    parser.add_argument("--record", action="store_true", help="record them, and write the pages")
    parser.add_argument(
        "--check", action="store_true", help="hold pages to the record; run nothing"
    )
    parser.add_argument(
        "--pages", action="store_true", help="write the pages of the record; run nothing"
    )
    for name, options in study.options.items():
        parser.add_argument(f"--{name}", **options)
    asked = parser.parse_args(arguments)
    if asked.check:
        return told(study.stale())
    if asked.pages:
        settle(study.pages(study.recorded()))
        return 0
    names = chosen(study.cells(), asked.words)
    if not names:
        parser.error(f"nothing is called {' or '.join(asked.words)}")
    found: Cells = {}
    problems = []
    with quietly():
        for name, verdict in tqdm(study.measure(names, asked), total=len(names), disable=None):
            found[name], why = verdict, study.wrong(name, verdict)
            problems += [name] if why else []
            tqdm.write(f"{'WRONG: ' if why else ''}{name}: {verdict}")
            sys.stdout.flush()
    if asked.record:
        study.record(found)
    counts = Counter(str(verdict["status"]) for verdict in found.values() if "status" in verdict)
    print(f"{len(found)} cells, {len(problems)} wrong {dict(counts)}")
    return int(bool(problems))
