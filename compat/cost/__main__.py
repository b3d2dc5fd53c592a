"""Measure what `autopack.enable` costs on models that somebody has changed, and fail where a bound is broken.

    python -m compat.cost                            all cases (compat/cost/cases.py) in the installed transformers
    python -m compat.cost --release 5.20.2 5.23.0    in these releases (compat/environments.py)
    python -m compat.cost --only hook norms          cases whose names contain one of these words

Every case has a process of its own, without anything that earlier ones may have kept. Measured is the default call, and
the first packed call beyond the second one where a proof waits for it: processor time of all threads, and the peak of
memory above what was there. The exit status is 1 where a model is not enabled, or needs more than 3 seconds or a tenth
of its weights. Where the very model had to be audited, the bounds are 10 seconds and 35 %: what 32 forwards take here,
and a tenth of the weights above activations of a few dozen tokens, their graphs and what the allocator keeps of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from compat.cells import private_output
from compat.environments import Environment, cache_directory, check_interpreter
from compat.matrix import ROOT, CompatError, load_matrix
from compat.spending import Spent, spending
from compat.tables import plain_table

SECONDS, SHARE = 3.0, 0.1
"""The bounds: of processor time, and of memory as a share of the weights."""
AUDITED = 10.0, 0.35
"""Those of a model that was audited itself."""
LIMIT = 600.0
"""Seconds that a case may take."""


def measure(name: str) -> dict[str, Any]:
    """Enable the model of a case in this process: what it cost, what has proven it, or the `reason` against it."""
    import torch
    from transformers import logging as theirs

    import autopack
    from autopack.errors import AutopackError
    from compat.cost.cases import CASES

    torch.set_num_threads(1)
    theirs.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    model = CASES[name]()
    meta = any(parameter.is_meta for parameter in model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    ids = torch.arange(48)[None] % 100
    if not meta:
        # What torch sets up at the first step of a process is not what `enable` costs.
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
    found: dict[str, Any] = {"name": name, "weights": weights}
    with spending() as spent:
        try:
            handle = autopack.enable(model)
        except AutopackError as error:
            return {**found, "reason": str(error)}
    found |= {"enable": _row(spent), "proof": handle.enabled.proof.source, "verified": handle.verified}
    if handle.enabled.proof.waits:
        if meta:
            return {**found, "reason": "the proof waits for a packed call, which the meta device does not give"}
        where = torch.cat([torch.arange(24), torch.arange(24)])[None]
        calls = [Spent(), Spent()]
        for number in (0, 1):
            with torch.no_grad(), spending() as calls[number]:
                try:
                    model(input_ids=ids, position_ids=where)
                except AutopackError as error:
                    return {**found, "reason": str(error)}
        first, second = calls
        waited = Spent(max(0.0, first.seconds - second.seconds), max(0, first.bytes - second.bytes))
        found |= {"first call": _row(waited), "proof": handle.enabled.proof.source, "verified": handle.verified}
    return found


def _row(spent: Spent) -> dict[str, float]:
    return {"seconds": round(spent.seconds, 2), "bytes": spent.bytes}


def in_process(name: str, environ: dict[str, str]) -> dict[str, Any]:
    """Measure a case in a fresh process that finds an empty cache folder."""
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "compat.cost", "--case", name],
                cwd=ROOT,
                env={**environ, "XDG_CACHE_HOME": empty},
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "weights": 0, "reason": f"took longer than {LIMIT:.0f} s"}
    if done.returncode:
        said = " ".join(done.stderr.strip().splitlines()[-1:])
        return {"name": name, "weights": 0, "reason": f"ended with status {done.returncode}: {said}"}
    return json.loads(done.stdout)


def names_of_cases() -> list[str]:
    """All cases, in their order."""
    from compat.cost.cases import CASES

    return list(CASES)


def environment(release: str | None) -> dict[str, str]:
    """The environment variables of processes in a release, or in the installed transformers."""
    if release is None:
        return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    matrix = load_matrix()
    found = Environment(matrix, matrix.select([release])[0], cache_directory())
    found.build()
    return found.environ()


def broken(found: dict[str, Any]) -> list[str]:
    """The bounds that a case breaks, or why its model is not enabled; a clause each."""
    said = [f"not enabled: {found['reason']}"] if "reason" in found else []
    for when in ("enable", "first call"):
        if when in found:
            seconds, share = found[when]["seconds"], found[when]["bytes"] / found["weights"]
            most_seconds, most = AUDITED if found.get("proof") == "audit" else (SECONDS, SHARE)
            said += [f"{when} takes {seconds} s"] if seconds > most_seconds else []
            said += [f"{when} needs {share:.0%} of the weights"] if share > most else []
    return said


def _line(release: str, found: dict[str, Any]) -> list[str]:
    cells = []
    for when in ("enable", "first call"):
        spent = found.get(when)
        cells += ["", ""] if spent is None else [f"{spent['seconds']:.2f} s", _share(spent["bytes"], found["weights"])]
    return [release, found["name"], found.get("proof", ""), *cells, "no" if broken(found) else "yes"]


def _share(spent: int, weights: int) -> str:
    return f"{spent / 2**20:.0f} MB, {spent / weights:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", nargs="+", default=[None], metavar="RELEASE", help="releases of matrix.toml")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="words of names of cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.case:
        with private_output() as answers:
            answers.write(json.dumps(measure(asked.case)) + "\n")
        return 0
    names = [n for n in names_of_cases() if not asked.only or any(word.lower() in n.lower() for word in asked.only)]
    if not names:
        parser.error("no such case")
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        if asked.release != [None]:
            check_interpreter(load_matrix())
        for release in asked.release:
            environ, shown = environment(release), release or metadata.version("transformers")
            found[shown] = [in_process(name, environ) for name in names]
    except CompatError as error:
        print(f"error: {error}")
        return 2
    head = ["transformers", "case", "proof", "enable", "memory", "first call", "memory", "within bounds"]
    print(plain_table([head, *(_line(release, each) for release, rows in found.items() for each in rows)]))
    problems = [
        (release, each["name"], why) for release, rows in found.items() for each in rows for why in broken(each)
    ]
    for release, name, why in problems:
        print(f"FAILED {release}, {name}: {why}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
