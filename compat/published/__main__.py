"""Enable published configurations at full size on the meta device, in one or several releases of
transformers.

    python -m compat.published                          all of them, in the installed transformers
    python -m compat.published --release 4.57.6 5.20.2  in these releases, side by side (compat/environments.py)
    python -m compat.published "llama 3" bert           those whose names contain one of these
    python -m compat.published --record                 in the releases of the record: compat/results/published.*

A configuration is
    enabled         by the default call, and the table says what has proven it
    refused         autopack says why it does not; the exit status is 1
    crash           an error that autopack did not mean, or no answer; the exit status is 1
    upstream error  stock itself cannot build it in this release
    absent          the release has no such type
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from tqdm import tqdm

from compat.common import write_json
from compat.environments import Environment, check_interpreter, environ_of
from compat.matrix import RESULTS as RESULTS_FOLDER
from compat.matrix import ROOT, CompatError, load_matrix
from compat.published import PUBLISHED
from compat.published.measure import BAD, STATUSES

RESULTS = RESULTS_FOLDER / "published.json"
RELEASES = ("4.57.6", "5.14.1", "5.20.2", "5.23.0")
Found = dict[str, dict[str, dict[str, Any]]]
"""By release and configuration, what came of it."""


def in_release(release: str | None, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure configurations in a release, or in the installed transformers: one result after the
    other."""
    environ = environ_of()
    if release is not None:
        matrix = load_matrix()
        check_interpreter(matrix)
        environment = Environment(matrix, matrix.select([release])[0])
        environment.build()
        environ = environment.environ()
    # What earlier runs may have kept under the user's cache folder is not to be found.
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "compat.published.measure", *names]
        environ |= {"XDG_CACHE_HOME": empty}
        with subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
    if process.returncode:
        raise CompatError(
            f"{' '.join(command[:3])} in {release or 'the installed release'} ended with an error"
        )


def table(found: Found) -> str:
    """A table in Markdown: a row for each configuration, a column for each release, and the reasons
    below."""
    reasons: dict[str, int] = {}
    lines = [
        ["configuration", "class", "parameters", *found],
        ["---", "---", "---:", *["---"] * len(found)],
    ]
    for name in [name for name in PUBLISHED if any(name in results for results in found.values())]:
        cells = [results.get(name, {}) for results in found.values()]
        size = next((_count(cell["parameters"]) for cell in cells if "parameters" in cell), "")
        lines.append([name, PUBLISHED[name][0], size, *(_cell(cell, reasons) for cell in cells)])
    counts = []
    for release, results in found.items():
        number = Counter(each["status"] for each in results.values())
        counts.append(
            f"* {release}: "
            + ", ".join(f"{number[each]} {each}" for each in STATUSES if number[each])
        )
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*rows, "", *counts, "", *notes]).rstrip() + "\n"


def _cell(found: dict[str, Any], reasons: dict[str, int]) -> str:
    if not found:
        return ""
    if found["status"] == "absent":
        return "-"
    noted = "".join(
        f" [{reasons.setdefault(f'{kind}{_line(found[what])}', len(reasons) + 1)}]"
        for what, kind in (
            ("reason", ""),
            ("labels", "labels raise: "),
            ("padded", "padding stays: "),
        )
        if what in found
    )
    if found["status"] != "enabled":
        return (
            f"**{found['status']}**{noted}"
            if found["status"] in BAD
            else f"{found['status']}{noted}"
        )
    return f"{found['proof'] or 'enabled'}, {found['seconds']} s, {found['megabytes']} MB{noted}"


def _line(reason: str) -> str:
    """A reason in one line that is the same in every run, without what is said of every model."""
    said = reason.split("and it is not exact: ")[-1].split(". The model is left as it was")[0]
    line = re.sub(r"0x[0-9a-f]{6,}", "0x", " ".join(said.split()))
    return line if len(line) <= 500 else line[:499] + "…"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def document(recorded: dict[str, Any]) -> str:
    """The recorded results as the file that is committed."""
    return "\n".join(
        [
            "<!-- Generated by `python -m compat.published --record`; do not edit. -->",
            "# Published configurations",
            "",
            (
                "Models of the configurations that their authors publish, at full size on the meta "
                "device, enabled by the"
            ),
            (
                f"default call; torch {recorded['torch']}. A cell says what has proven the model "
                "(`handle.enabled.proof`),"
            ),
            (
                "and the processor time and peak memory of `enable`. compat/published has the "
                "configurations."
            ),
            "",
            table(recorded["releases"]),
        ]
    )


def main() -> int:
    """Do what the command line asks for; 1 where something is refused or crashes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="words of names of configurations (default: all)")
    parser.add_argument(
        "--release", nargs="+", default=[None], metavar="RELEASE", help="releases of matrix.toml"
    )
    parser.add_argument(
        "--record", action="store_true", help="put them among what is recorded of these releases"
    )
    asked = parser.parse_args()
    names = [
        name
        for name in PUBLISHED
        if not asked.words or any(w.lower() in name.lower() for w in asked.words)
    ]
    releases = list(RELEASES) if asked.record and asked.release == [None] else asked.release
    found: Found = {}
    for release in releases:
        shown = release or metadata.version("transformers")
        bar = tqdm(in_release(release, names), shown, len(names), unit="model", disable=None)
        found[shown] = {each.pop("name"): each for each in bar}
        if asked.record:  # a run that is stopped has recorded the releases that it has been through
            before = json.loads(RESULTS.read_text(encoding="utf-8"))["releases"]
            before[shown] = {**before.get(shown, {}), **found[shown]}
            whole = {"torch": metadata.version("torch").partition("+")[0], "releases": before}
            write_json(RESULTS, whole)
            RESULTS.with_suffix(".md").write_text(document(whole), encoding="utf-8")
    print(table(found))
    return (
        1
        if any(each["status"] in BAD for results in found.values() for each in results.values())
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
