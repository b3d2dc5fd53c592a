"""Run transformers' own model tests with every model enabled, and list what fails only then.

    python -m compat.upstream DIRECTORY                   the types below
    python -m compat.upstream DIRECTORY --types llama t5  some types, printed only
    python -m compat.upstream DIRECTORY --record          also write docs/upstream.md

DIRECTORY holds transformers' `tests` folder and its `conftest.py`, and stays outside of this project: `tests/*.py` come
with the source distribution of a release (`pip download --no-deps --no-binary :all: transformers==VERSION`), `tests/models`,
`tests/generation` and `conftest.py` with its repository. What fails is run again in one process, stock, and what passes then once more
enabled: tests that need the hub, a GPU or a package that is not installed fail in both forms and do not count, nor do those
that fail now and then.

The exit status is 1 where a test fails that `compat/upstream.toml` does not name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import json

import torch
import transformers

import autopack

ROOT = Path(__file__).parents[1]
DOCUMENTED = Path(__file__).with_name("upstream.toml")
PAGE = ROOT / "docs" / "upstream.md"
TYPES = """llama gemma2 gemma3 qwen3 qwen3_moe mixtral gpt2 bert roberta modernbert t5 bart mamba mamba2 bamba qwen3_next rwkv xlstm
recurrent_gemma whisper qwen2_5_vl llava paligemma deberta_v2 longformer gpt_oss falcon bloom""".split()
Outcomes = dict[str, dict[str, Any]]
"""By the name of a test: its `outcome`, `why` it failed, and what became of its `models`."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where transformers' tests folder and conftest.py are")
    parser.add_argument("--types", nargs="+", default=TYPES, help="model types, as their test folders are named")
    parser.add_argument("--unpad", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of pytest")
    parser.add_argument("--keyword", "-k", default="", help="only tests that match, as pytest's -k")
    parser.add_argument("--record", action="store_true", help="write docs/upstream.md")
    args = parser.parse_args(arguments)
    files = [find(args.directory, model_type) for model_type in args.types]
    enabled = run(args, files, args.unpad)
    suspects = [name for name, found in enabled.items() if found["outcome"] == "failed"]
    stock: Outcomes = {}
    if suspects:
        args.jobs, args.keyword = 0, ""
        stock = run(args, suspects, None)
        suspects = [name for name in suspects if stock.get(name, {}).get("outcome") == "passed"]
    if suspects:
        enabled |= run(args, suspects, args.unpad)
    failures = [name for name in suspects if enabled[name]["outcome"] == "failed"]
    print(table(args.types, stock, enabled))
    reasons = documented()
    unnamed = 0
    for name in failures:
        reason = next((said for pattern, said in reasons.items() if fnmatch(name, f"*{pattern}")), None)
        unnamed += reason is None
        print(f"\n{name}\n    {reason or 'NOT DOCUMENTED: ' + enabled[name]['why']}")
    if args.record:
        PAGE.write_text(page(args, stock, enabled, failures, reasons))
    return int(unnamed > 0)


def find(directory: Path, model_type: str) -> str:
    """The file of the model tests of a type, from the directory."""
    path = Path("tests", "models", model_type, f"test_modeling_{model_type}.py")
    if not (directory / path).is_file():
        raise SystemExit(f"{directory / path} is missing; DIRECTORY has to hold transformers' tests (--help says whence)")
    return str(path)


def run(args: argparse.Namespace, what: list[str], unpad: str | None) -> Outcomes:
    """Run tests in one form: stock where `unpad` is None."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-p", "compat.upstream_plugin", "-p", "no:cacheprovider", "-q", "--tb=no"]
        command += ["-n", str(args.jobs), "--outcomes", str(outcomes), "--no-header", "-rN", "--disable-warnings"]
        command += ["-k", args.keyword] if args.keyword else []
        command += ["--unpad", unpad] if unpad else []
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        surroundings = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        print(f"\n{'enabled, unpad=' + repr(unpad) if unpad else 'stock'}", flush=True)
        done = subprocess.run([*command, *what], cwd=args.directory, env={**os.environ, **surroundings}, check=False)
        if done.returncode > 1:  # 1 says that tests failed
            raise SystemExit(f"pytest ended with status {done.returncode}; see what it says: {' '.join(command)}")
        found: Outcomes = json.loads(outcomes.read_text())
        return found


def documented() -> dict[str, str]:
    """Why tests fail when enabled, by a pattern of their names."""
    found = tomllib.loads(DOCUMENTED.read_text())["documented"]
    return {entry["test"]: " ".join(entry["reason"].split()) for entry in found}


def table(types: list[str], stock: Outcomes, enabled: Outcomes) -> str:
    """A line per type: tests that pass stock, those among them in which a model was enabled, and those that fail."""
    lines = ["| type | pass stock | with an enabled model | fail when enabled |", "|---|---|---|---|"]
    failures = new_failures(stock, enabled)
    total: Counter[int] = Counter()
    for model_type in types:
        here = [name for name, found in stock.items() if f"/{model_type}/" in name and found["outcome"] == "passed"]
        with_model = sum(any(fate.startswith("enabled") for fate in enabled[n]["models"].values()) for n in here if n in enabled)
        row = (len(here), with_model, sum(name in failures for name in here))
        total.update(dict(enumerate(row)))
        lines.append(f"| {model_type} | {' | '.join(map(str, row))} |")
    return "\n".join([*lines, f"| all | {' | '.join(str(total[i]) for i in range(3))} |"])


def left(enabled: Outcomes) -> Counter[str]:
    """Why models of the tests were not enabled, counted by test."""
    fates = (fate for found in enabled.values() for fate in found["models"].values())
    return Counter(fate for fate in fates if not fate.startswith("enabled"))


def page(args: argparse.Namespace, stock: Outcomes, enabled: Outcomes, failures: list[str], reasons: dict[str, str]) -> str:
    """docs/upstream.md"""
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())
