"""Run transformers' own model tests with every model enabled, and list what fails only then.

    python -m compat.upstream --directory DIRECTORY --record      all types, and docs/upstream.md written
    python -m compat.upstream --directory DIRECTORY llama t5

DIRECTORY is a checkout of transformers' repository, or what of it its tests need (`tests`, `utils`,
`conftest.py`), and stays outside of this project. Of another commit than the installed release,
`tests/*.py` are better taken from the source distribution of that release (`pip download --no-deps
--no-binary :all: transformers==VERSION`).

What fails is run again in one process, first stock, and what passes then once more enabled: tests
that need the hub, a GPU or a package that is not installed fail in both forms and do not count, nor
do those that fail now and then. A test that fails is wrong if `compat/upstream.toml` does not name
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from compat import study
from compat.matrix import ROOT, tomllib
from compat.study import Cells, Study, Verdict
from compat.tables import markdown_table

PAGE = ROOT / "docs" / "upstream.md"
TYPES = """
llama gemma2 gemma3 qwen3 qwen3_moe mixtral gpt2 bert roberta modernbert t5 bart mamba mamba2 bamba qwen3_next rwkv
xlstm recurrent_gemma whisper qwen2_5_vl llava paligemma deberta_v2 longformer gpt_oss falcon bloom
""".split()
Outcomes = dict[str, dict[str, Any]]
"""By the name of a test: its `outcome`, `why` it failed, and what became of its `models`."""


def _measured(types: list[str], asked: Any) -> Iterator[tuple[str, Verdict]]:
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in types]
    if missing := [each for each in files if not (asked.directory / each).is_file()]:
        raise SystemExit(
            f"DIRECTORY has to hold transformers' tests (--help says whence): {missing}"
        )
    enabled = run(asked.directory, files, asked.jobs)
    failing = [name for name, found in enabled.items() if found["outcome"] == "failed"]
    stock = run(asked.directory, failing, enabled=False)
    failing = [name for name in failing if stock.get(name, {}).get("outcome") == "passed"]
    enabled |= run(asked.directory, failing)
    for model_type in types:
        here = {name: found for name, found in enabled.items() if f"/{model_type}/" in name}
        passed = [found for found in here.values() if found["outcome"] == "passed"]
        fails = {
            name: here[name]["why"]
            for name in failing
            if name in here and here[name]["outcome"] == "failed"
        }
        yield (
            model_type,
            {"pass": len(passed), "enabled": sum(map(_has_enabled, passed)), "fail": fails},
        )


def run(directory: Path, what: list[str], jobs: int = 0, enabled: bool = True) -> Outcomes:
    """Run tests in one form."""
    if not what:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        options = (
            "-p compat.upstream_plugin -p no:cacheprovider -q --tb=no --no-header -rN "
            f"--disable-warnings -n {jobs} --outcomes"
        )
        command = [sys.executable, "-m", "pytest", *options.split(), str(outcomes)]
        command += ["--enabled"] if enabled else []
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        same = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ = {**os.environ, **same, "PYTHONPATH": paths}
        print(f"\n{'enabled' if enabled else 'stock'}", flush=True)
        done = subprocess.run([*command, *what], cwd=directory, env=environ, check=False)
        if done.returncode > 1:  # 1 says that tests failed
            raise SystemExit(
                f"pytest ended with status {done.returncode}; see what it says: {' '.join(command)}"
            )
        found: Outcomes = json.loads(outcomes.read_text())
        return found


def _has_enabled(found: dict[str, Any]) -> bool:
    return any(fate.startswith("enabled") for fate in found["models"].values())


def documented() -> dict[str, str]:
    """Why tests fail when enabled, by a pattern of their names."""
    found = tomllib.loads(Path(__file__).with_name("upstream.toml").read_text())["documented"]
    return {entry["test"]: " ".join(entry["reason"].split()) for entry in found}


def wrong(_: str, found: Verdict) -> str | None:
    """The tests that fail, and that nothing documents, with what they say."""
    return "; ".join(
        f"{test}: {why}"
        for test, why in found["fail"].items()
        if not any(fnmatch(test, glob) for glob in documented())
    )


def page(cells: Cells) -> str:
    """The page that says which of transformers' tests fail with an enabled model, and why."""
    rows = [[found["pass"], found["enabled"], len(found["fail"])] for found in cells.values()]
    rows.append([sum(column) for column in zip(*rows, strict=True)])
    names = ["type", *cells, "all"]
    head = ["pass", "of them with an enabled model", "fail when enabled"]
    table = [[name, *map(str, row)] for name, row in zip(names, [head, *rows], strict=True)]
    lines = [
        "# transformers' own tests, with every model enabled",
        "",
        "Written by `python -m compat.upstream --directory DIRECTORY --record` with transformers "
        f"{study.recorded('upstream')['with']['transformers']}. Every model of these tests was enabled "
        "at its first call (`unpad=True`).",
        "The model tests are those of a public copy of the repository at 5.16.0.dev0, their helpers "
        "those of the source distribution of 5.23.0, without the tests of FSDP and tensor "
        "parallelism, which need several devices.",
        "",
        *markdown_table(table),
        "",
        "What fails then, and why:",
    ]
    failing = [
        test.removeprefix("tests/models/") for found in cells.values() for test in found["fail"]
    ]
    for glob, reason in documented().items():
        tests = [test for test in failing if fnmatch(f"tests/models/{test}", glob)]
        lines += ["", f"* {reason}", *(f"  * `{test}`" for test in tests)] if tests else []
    return "\n".join([*lines, ""])


STUDY = Study(
    "upstream",
    str(__doc__),
    lambda: TYPES,
    _measured,
    wrong,
    options={
        "directory": {"type": Path, "default": Path(), "help": "where transformers' tests are"},
        "jobs": {"type": int, "default": os.cpu_count(), "help": "processes of pytest"},
    },
    pages=lambda cells: {PAGE: page(cells)},
)

if __name__ == "__main__":
    raise SystemExit(study.main(STUDY))
