"""The museum's part of docs/leaks.md: a table of all exhibits by kind, made from the record."""

from __future__ import annotations

import json
from pathlib import Path

from compat.matrix import ROOT
from compat.museum.exhibit import KINDS, load
from compat.museum.measure import Outcome

PAGE = ROOT / "docs" / "leaks.md"
PLACE = "<!-- museum: written by `python -m compat.museum --record` -->", "<!-- /museum -->"

PROJECTS: dict[str, str] = json.loads(Path(__file__).with_name("projects.json").read_text())
"""Owners and names of projects that go by their name alone."""


def project(source: str) -> str:
    """Return the project of a report: owner and name, or what it is called where the owner is not
    known."""
    name = source.partition("#")[0]
    return PROJECTS.get(name, name)


def projects(names: list[str]) -> set[str]:
    """Return the projects of all reports."""
    return {project(source) for name in names for source in load(name).reported}


def part(exhibits: dict[str, Outcome]) -> str:
    """Return the part of the page between its two comments."""
    found = sum(outcome["found"] is not None for outcome in exhibits.values())
    alarms = sum(outcome["sound"] is not None for outcome in exhibits.values())
    models = [outcome["enabled"] for outcome in exhibits.values() if "enabled" in outcome]
    exact = sum(outcome == "exact" for outcome in models)
    lines = [
        f"{len(exhibits)} mistakes from {len(projects([*exhibits]))} projects: the auditor finds "
        f"{found} of them, and raises {alarms} alarms on their sound twins. Of {len(models)} "
        f"models {exact} are exact once they are",
        f"enabled, and {len(models) - exact} are refused.",
        "",
        "| kind | what went wrong | reported | found in | enabled |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [name for name in exhibits if load(name).kind == kind]
        lines += [
            _row(name, exhibits[name], kind if name == of_kind[0] else "") for name in of_kind
        ]
    return "\n".join(lines)


def _row(name: str, outcome: Outcome, kind: str) -> str:
    exhibit = load(name)
    folder, _, file = name.partition(".")
    said = f"[{file.replace('_', ' ')}](../compat/museum/{folder}/{file}.py): {exhibit.says}"
    links = ", ".join(map(_link, exhibit.reported))
    cells = [f"**{kind}**" if kind else "", said, links, str(outcome["found"])]
    return f"| {' | '.join(cells)} | {outcome.get('enabled', '')} |"


def _link(source: str) -> str:
    name, _, number = source.partition("#")
    return f"[{name.rpartition('/')[2]}#{number}](https://github.com/{project(source)}/issues/{number})"
