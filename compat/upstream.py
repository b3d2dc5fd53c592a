"""Run transformers' own model tests with every model enabled, and list what fails only then.

    python -m compat.upstream DIRECTORY                   the types below
    python -m compat.upstream DIRECTORY --types llama t5  some types, printed only
    python -m compat.upstream DIRECTORY --record          also write docs/upstream.md

DIRECTORY is a checkout of transformers' repository, or what of it its tests need (`tests`, `utils`,
`conftest.py`), and stays outside of this project. Of another commit than the installed release,
`tests/*.py` are better taken from the source distribution of that release (`pip download --no-deps
--no-binary :all: transformers==VERSION`).

What fails is run again in one process, first stock, and what passes then once more enabled: tests
that need the hub, a GPU or a package that is not installed fail in both forms and do not count, nor
do those that fail now and then. The exit status is 1 where a test fails that `compat/upstream.toml`
does not name."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers

from compat import study
from compat.matrix import ROOT, tomllib
from compat.tables import markdown_table

DOCUMENTED = Path(__file__).with_name("upstream.toml")
PAGE = ROOT / "docs" / "upstream.md"
TYPES = """
llama gemma2 gemma3 qwen3 qwen3_moe mixtral gpt2 bert roberta modernbert t5 bart mamba mamba2 bamba qwen3_next rwkv
xlstm recurrent_gemma whisper qwen2_5_vl llava paligemma deberta_v2 longformer gpt_oss falcon bloom
""".split()
Outcomes = dict[str, dict[str, Any]]
"""By the name of a test: its `outcome`, `why` it failed, and what became of its `models`."""


def main(arguments: list[str] | None = None) -> int:
    parser = study.parser_of(__doc__)
    parser.add_argument(
        "directory", type=Path, help="where transformers' tests folder and conftest.py are"
    )
    parser.add_argument(
        "--types", nargs="+", default=TYPES, help="model types, as their test folders are named"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of pytest")
    parser.add_argument("--record", action="store_true", help="write docs/upstream.md")
    parser.add_argument(
        "--note", default="", help="a sentence of that page on where the tests come from"
    )
    args = parser.parse_args(arguments)
    files = [find(args.directory, model_type) for model_type in args.types]
    enabled = run(args, files)
    suspects = [name for name, found in enabled.items() if found["outcome"] == "failed"]
    stock: Outcomes = {}
    if suspects:
        args.jobs = 0
        stock = run(args, suspects, enabled=False)
        suspects = [name for name in suspects if stock.get(name, {}).get("outcome") == "passed"]
    if suspects:
        enabled |= run(args, suspects)
    failures = [name for name in suspects if enabled[name]["outcome"] == "failed"]
    reasons = documented()
    named = {
        test: next((said for glob, said in reasons.items() if fnmatch(test, glob)), None)
        for test in failures
    }
    counted = table(args.types, enabled, failures)
    print(f"\n{counted}")
    for test, reason in named.items():
        print(f"\n{test}\n    {reason or 'NOT DOCUMENTED: ' + enabled[test]['why']}")
    if args.record:
        PAGE.write_text(page(counted, failures, reasons, args.note))
    return int(None in named.values())


def find(directory: Path, model_type: str) -> str:
    """The file of the model tests of a type, from the directory."""
    path = Path("tests", "models", model_type, f"test_modeling_{model_type}.py")
    if not (directory / path).is_file():
        raise SystemExit(
            f"{directory / path} is missing; DIRECTORY has to hold transformers' tests (--help "
            "says whence)"
        )
    return str(path)


def run(args: argparse.Namespace, what: list[str], enabled: bool = True) -> Outcomes:
    """Run tests in one form."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        options = (
            "-p compat.upstream_plugin -p no:cacheprovider -q --tb=no --no-header -rN "
            f"--disable-warnings -n {args.jobs} --outcomes"
        )
        command = [sys.executable, "-m", "pytest", *options.split(), str(outcomes)]
        command += ["--enabled"] if enabled else []
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        same = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ = {**os.environ, **same, "PYTHONPATH": paths}
        print(f"\n{'enabled' if enabled else 'stock'}", flush=True)
        done = subprocess.run([*command, *what], cwd=args.directory, env=environ, check=False)
        if done.returncode > 1:  # 1 says that tests failed
            raise SystemExit(
                f"pytest ended with status {done.returncode}; see what it says: {' '.join(command)}"
            )
        found: Outcomes = json.loads(outcomes.read_text())
        return found


def documented() -> dict[str, str]:
    """Why tests fail when enabled, by a pattern of their names."""
    found = tomllib.loads(DOCUMENTED.read_text())["documented"]
    return {entry["test"]: " ".join(entry["reason"].split()) for entry in found}


def table(types: list[str], enabled: Outcomes, failures: list[str]) -> str:
    """A line per type: tests that pass enabled, those among them in which a model was, and those
    that fail."""
    rows = [["type", "pass", "of them with an enabled model", "fail when enabled"]]
    total: Counter[int] = Counter()
    for model_type in types:
        here = [name for name in enabled if f"/{model_type}/" in name]
        passed = [enabled[name] for name in here if enabled[name]["outcome"] == "passed"]
        row = len(passed), sum(map(_has_enabled, passed)), len({*here} & {*failures})
        total.update(dict(enumerate(row)))
        rows.append([model_type, *map(str, row)])
    return "\n".join(markdown_table([*rows, ["all", *(str(total[column]) for column in range(3))]]))


def _has_enabled(found: dict[str, Any]) -> bool:
    return any(fate.startswith("enabled") for fate in found["models"].values())


def page(counted: str, failures: list[str], reasons: dict[str, str], note: str = "") -> str:
    """The page that says which of transformers' tests fail with an enabled model, and why."""
    lines = [
        "# transformers' own tests, with every model enabled",
        "",
        "Written by `python -m compat.upstream DIRECTORY --record` with transformers "
        f"{transformers.__version__}. Every model of these tests was enabled at its first call "
        "(`unpad=True`).",
        *([note] if note else []),
        "",
        counted,
        "",
        "What fails then, and why:" if failures else "Nothing fails that passes without autopack.",
    ]
    for glob, reason in reasons.items():
        tests = [test for test in failures if fnmatch(test, glob)]
        lines += (
            ["", f"* {reason}", *(f"  * `{test.removeprefix('tests/models/')}`" for test in tests)]
            if tests
            else []
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
