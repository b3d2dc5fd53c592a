"""Enable published configurations at full size on the meta device, in one or several releases of transformers.

    python -m compat.published                          all of them, in the installed transformers
    python -m compat.published --release 4.57.6 5.20.2  in these releases, side by side (compat/environments.py)
    python -m compat.published --types llama bert       of these types; --names for words of their names
    python -m compat.published --record                 all, in the releases of the record: compat/results/published.*;
                                                        with --names or --types, some anew
    python -m compat.published --table                  write the table from the recorded results

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
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compat.cells import private_output
from compat.environments import Environment, cache_directory, check_interpreter
from compat.matrix import COMPAT, ROOT, CompatError, load_matrix
from compat.published import PUBLISHED
from compat.published.measure import BAD, STATUSES, measured

RESULTS = COMPAT / "results" / "published.json"
TABLE = RESULTS.with_suffix(".md")
RELEASES = ("4.57.6", "5.14.1", "5.20.2", "5.23.0")
Found = dict[str, dict[str, dict[str, Any]]]
"""By release and configuration, what came of it."""


def chosen(types: Sequence[str], names: Sequence[str]) -> list[str]:
    """The configurations of these types whose names contain one of these words; all where none are given."""
    return [
        name
        for name, (_, fields) in PUBLISHED.items()
        if (not types or fields["model_type"] in types)
        and (not names or any(word.lower() in name.lower() for word in names))
    ]


def in_release(release: str | None, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure configurations in a release, or in the installed transformers: one result after the other."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if release is not None:
        matrix = load_matrix()
        environment = Environment(matrix, matrix.select([release])[0], cache_directory())
        environment.build()
        environ = environment.environ()
    # What earlier runs may have kept under the user's cache folder is not to be found.
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "compat.published", "--serve"]
        environ |= {"XDG_CACHE_HOME": empty}
        with subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(list(names)))
            process.stdin.close()
            for line in process.stdout:
                yield json.loads(line)
    if process.returncode:
        raise CompatError(f"{' '.join(command)} in {release or 'the installed release'} ended with an error")


def serve() -> None:
    """Measure the configurations named on standard input (JSON): a line of JSON for each on standard output."""
    with private_output() as answers:
        for found in measured(json.loads(sys.stdin.read())):
            answers.write(json.dumps(found, ensure_ascii=False) + "\n")
            answers.flush()


def table(found: Found, names: Sequence[str]) -> str:
    """A table in Markdown: a row for each configuration, a column for each release, and the reasons below."""
    reasons: dict[str, int] = {}
    head = ["configuration", "class", "parameters", *found]
    lines = [" | ".join(head), " | ".join(["---", "---", "---:", *["---"] * len(found)])]
    for name in names:
        cells = [results.get(name, {}) for results in found.values()]
        size = next((_count(cell["parameters"]) for cell in cells if "parameters" in cell), "")
        lines.append(" | ".join([name, PUBLISHED[name][0], size, *(_cell(cell, reasons) for cell in cells)]))
    lines = [f"| {line} |" for line in lines]
    counts = [
        f"{release}: " + ", ".join(f"{number} {status}" for status, number in counted(results).items() if number)
        for release, results in found.items()
    ]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *(f"* {line}" for line in counts), "", *notes]).rstrip() + "\n"


def _cell(found: dict[str, Any], reasons: dict[str, int]) -> str:
    if not found:
        return ""
    if found["status"] == "absent":
        return "-"
    noted = "".join(
        f" [{reasons.setdefault(f'{kind}{_line(found[what])}', len(reasons) + 1)}]"
        for what, kind in (("reason", ""), ("labels", "labels raise: "), ("padded", "padding stays: "))
        if what in found
    )
    if found["status"] != "enabled":
        return f"**{found['status']}**{noted}" if found["status"] in BAD else f"{found['status']}{noted}"
    return f"{found['proof'] or 'enabled'}, {found['seconds']} s, {found['megabytes']} MB{noted}"


def _line(reason: str) -> str:
    """A reason in one line that is the same in every run, without what is said of every model."""
    said = reason.split("and it is not exact: ")[-1].split(". The model is left as it was")[0]
    line = re.sub(r"0x[0-9a-f]{6,}", "0x", " ".join(said.split()))
    return line if len(line) <= 500 else line[:499] + "…"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def counted(results: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many configurations have which status."""
    return {status: sum(found["status"] == status for found in results.values()) for status in STATUSES}


def document(recorded: dict[str, Any]) -> str:
    """The recorded results as the file that is committed."""
    return "\n".join(
        [
            "<!-- Generated by `python -m compat.published --record`; do not edit. -->",
            "# Published configurations",
            "",
            "Models of the configurations that their authors publish, at full size on the meta device, enabled by the",
            f"default call; torch {recorded['torch']}. A cell says what has proven the model (`handle.enabled.proof`),",
            "and the processor time and peak memory of `enable`. compat/published has the configurations.",
            "",
            table(recorded["releases"], list(PUBLISHED)),
        ]
    )


def write(path: Path, found: Found) -> None:
    """Write results to a file."""
    result = {"torch": metadata.version("torch").partition("+")[0], "releases": found}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; 1 where something is refused or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", nargs="+", default=[], metavar="RELEASE", help="releases of matrix.toml")
    parser.add_argument("--types", nargs="+", default=[], metavar="TYPE", help="model types")
    parser.add_argument("--names", nargs="+", default=[], metavar="WORD", help="words of names of configurations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--record", action="store_true", help="record a run, or put some among what is recorded")
    parser.add_argument("--table", action="store_true", help="write the table from the recorded results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.serve:
        serve()
        return 0
    if asked.table:
        TABLE.write_text(document(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    names = chosen(asked.types, asked.names)
    if not names:
        parser.error("no such configuration")
    releases = asked.release or (list(RELEASES) if asked.record else [None])
    found: Found = {}
    try:
        if releases != [None]:
            check_interpreter(load_matrix())
        for release in releases:
            shown = release or metadata.version("transformers")
            bar = tqdm(in_release(release, names), shown, len(names), unit="model", disable=None)
            found[shown] = {each.pop("name"): each for each in bar}
            if asked.json is not None:
                write(asked.json, found)
            if asked.record:  # a run that is stopped has recorded the releases that it has been through
                before = json.loads(RESULTS.read_text(encoding="utf-8"))["releases"] if RESULTS.exists() else {}
                for name, results in found.items():  # of some configurations, those of others stay
                    before[name] = {**before.get(name, {}), **results}
                write(RESULTS, before)
                TABLE.write_text(document(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    except CompatError as error:
        print(f"error: {error}")
        return 2
    print(table(found, names))
    return 1 if any(each["status"] in BAD for results in found.values() for each in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
