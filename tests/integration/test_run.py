"""`autopack run`: scripts that do not know autopack, in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autopack import cli
from autopack.launch import settings
from tests.conftest import FLOAT32
from tests.integration.scripts import SCRIPTS

RUN = ("-m", "autopack", "run")
NOT_INHERITED = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
UNTRAINED = (
    "left as it is: it was not trained, only called without gradients, or with none of its own"
)


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def lines(self):
        """What autopack says, but for models that are only evaluated, and for speeds."""
        said = [
            line
            for line in self.err.splitlines()
            if line.startswith("autopack") and UNTRAINED not in line
        ]
        return [re.sub(r"[\d,]+ (?=real tokens per second)", "N ", line) for line in said]

    @property
    def untrained(self):
        return [line for line in self.err.splitlines() if UNTRAINED in line]

    @property
    def told(self):
        # Anywhere, and not line by line: processes of torchrun share stdout, and write text and
        # newline one by one.
        starts = [match.start() for match in re.finditer(re.escape('{"rank"'), self.out)]
        found = [json.JSONDecoder().raw_decode(self.out, start)[0] for start in starts]
        return sorted(found, key=lambda what: what["rank"])


@functools.cache
def directory():
    path = Path(tempfile.mkdtemp())
    for name, text in SCRIPTS.items():
        (path / f"{name}.py").write_text(text, encoding="utf-8")
    return path


@functools.cache
def start(*arguments, cwd=None, **variables):
    """Run a command of this Python in the directory of the scripts; the same command runs once."""
    foreign = ("AUTOPACK_", "HF_", "TRANSFORMERS_")
    kept = {
        k: v for k, v in os.environ.items() if k not in NOT_INHERITED and not k.startswith(foreign)
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or directory(),
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def both(*arguments, **variables):
    """The same by Python and by `autopack run`."""
    return start(*arguments, **variables), start(*RUN, *arguments, **variables)


@pytest.fixture(scope="module", autouse=True)
def _tidy():
    yield
    shutil.rmtree(directory())
    directory.cache_clear()


def line_of(*told):
    """The line of one process, or the one of several."""
    rank = f"rank {told[0]['rank']}: " if told[0]["rank"] else ""
    rank = f"{len(told)} processes: " if len(told) > 1 else rank
    what = {
        name: sum(each[name] for each in told) for name in ("batches", "padding", "columns", "rows")
    }
    share = f"{what['padding']:,} of {what['columns']:,} tokens were padding and were not computed"
    tokens = f"{what['columns'] - what['padding']:,}"
    calls = f"{what['batches']} calls, fill 100.0% ({tokens} real tokens in {tokens} columns)"
    return (
        f"autopack: {rank}LlamaForCausalLM (llama) enabled; {what['batches']} padded batches "
        f"packed inside; {share} ({what['padding'] / what['columns']:.1%}); trained: {calls}, "
        f"{what['rows'] / what['batches']:.1f} documents per row, N real tokens per second"
    )


def same_losses(found, expected):
    pairs = list(zip(found.told, expected.told, strict=True))
    return bool(pairs) and all(
        a["losses"] == pytest.approx(b["losses"], rel=FLOAT32) for a, b in pairs
    )


def test_a_loop_has_its_losses_and_the_line_counts_the_padding_of_every_batch():
    """It sees what it sees under Python; its model is enabled by the first call in training, its
    reference never."""
    stock, packed = both("loop.py", "--backend", "x")
    assert (stock.status, packed.status) == (0, 0), stock.err + packed.err
    assert same_losses(packed, stock)
    (seen,), (expected,) = packed.told, stock.told
    assert seen["padding"] > 0
    assert packed.lines == [line_of(seen)]
    assert packed.untrained == [f"autopack: LlamaForCausalLM (llama) {UNTRAINED}"]  # the reference
    assert (seen["first"], seen["reference"]) == (True, [])
    assert seen["argv"] == ["loop.py", "--backend", "x"]
    for name in ("argv", "path", "file", "name", "site", "signature"):
        assert seen[name] == expected[name]


def test_a_twin_of_a_model_is_none_of_the_script():
    """A model of somebody's own class is proven by a twin, which is made and called in training as
    the script's are."""
    found = start(*RUN, "changed.py")
    assert found.status == 0, found.err
    assert "on a tiny copy" in found.told[0]["verified"]
    assert found.lines == [line_of(found.told[0]).replace("LlamaForCausalLM", "Mine")], found.err
    assert not found.untrained


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_processes_of_torchrun_are_reached_and_one_line_counts_them_all():
    options = ("--nproc-per-node", "2", "--master-port", free_port(), "trainer.py")
    stock = start("-m", "torch.distributed.run", *options)
    assert stock.status == 0, stock.err
    ways = [("-m", "torch.distributed.run")]
    if shutil.which("torchrun") is not None:
        ways = [("torchrun",), *ways]
    for way in ways:
        packed = start(*RUN, *way, *options)
        assert packed.status == 0, packed.err
        assert same_losses(packed, stock)
        assert [what["rank"] for what in packed.told] == ["0", "1"]
        assert packed.lines == [line_of(*packed.told)]


def test_processes_that_the_script_starts():
    reached, kept_out = start(*RUN, "parent.py"), start(*RUN, "--no-subprocesses", "parent.py")
    assert reached.lines == [line_of(reached.told[0])]
    assert kept_out.lines == [
        "autopack: no transformers model was called in training in this process"
    ]
    assert same_losses(kept_out, reached)


def test_one_summary_of_all_processes_also_of_one_that_is_killed_and_each_warning_once(tmp_path):
    found = start(*RUN, "several.py", TMPDIR=str(tmp_path))
    warning, trained, left = found.lines
    both = ({**what, "rank": ""} for what in found.told[:2])
    assert trained == line_of(*both), "the one that is killed leaves its counts and no line"
    assert warning.startswith("autopack: rank 2: warning: NllbMoeForConditionalGeneration")
    assert left == warning.replace("rank 2: warning", "2 processes")
    assert sorted(found.untrained) == [found.untrained[0]]
    assert not list(tmp_path.glob("autopack-*")), "nothing stays on the disk"


def test_where_a_shell_script_starts_python_each_of_those_speaks_for_what_it_starts():
    script = directory() / "launch.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} parent.py\n{sys.executable} crash.py 0\n")
    script.chmod(0o755)
    found = start(*RUN, "./launch.sh")
    assert found.lines == [line_of(found.told[0])]


def test_a_forked_process_reports_although_it_leaves_past_atexit():
    lines = start(*RUN, "forked.py").lines
    assert (
        sum(
            "LlamaForCausalLM (llama) enabled; 1 padded batch packed inside" in line
            for line in lines
        )
        == 1
    )


def test_a_model_that_cannot_be_enabled_runs_as_it_would_have_unless_strict():
    stock, packed = both("unsupported.py")
    assert packed.told == stock.told
    warning, line = packed.lines
    assert warning.startswith(
        "autopack: warning: NllbMoeForConditionalGeneration (nllb-moe) left as it is: "
    )
    assert warning.replace("warning: ", "", 1) == line
    strict = start(*RUN, "--strict", "unsupported.py")
    assert (strict.status, strict.told, strict.lines) == (
        1,
        [],
        ["autopack.errors.UnsupportedModel: " + reason(line)],
    )


def reason(line):
    return line.partition("left as it is: ")[2]


@pytest.mark.parametrize(("arguments", "status"), [([], 1), (["7"], 7)])
def test_a_script_that_fails_has_its_own_traceback_and_status(arguments, status):
    stock, packed = both("crash.py", *arguments)
    assert packed.status == stock.status == status
    assert re.sub("^autopack: no transformers model.*\n", "", packed.err, flags=re.M) == stock.err
    assert (packed.err == stock.err) == (status == 1)  # a traceback has the last word


@pytest.mark.parametrize("target", [["view.py"], ["-m", "view"]])
@pytest.mark.parametrize("path", [None, "", "{0}", os.pathsep.join(("{0}", "elsewhere", ""))])
def test_path_and_sitecustomize_are_those_of_python(tmp_path, target, path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = __name__\n")
    given = {} if path is None else {"PYTHONPATH": path.format(tmp_path)}
    arguments = [*target, "--", "-m", "--strict", "--help"]
    stock = json.loads(start(*arguments, **given).out)
    for options in ([], ["--no-subprocesses"]):
        view, here, child = json.loads(start(*RUN, *options, *arguments, **given).out)
        assert view == stock[0]
        assert view["mine"] == ("sitecustomize" if path else None)
        if options:
            assert (
                (here["PYTHONPATH"] or None)
                == (child["PYTHONPATH"] or None)
                == (given.get("PYTHONPATH") or None)
            )
            assert here["AUTOPACK_RUN"] is child["AUTOPACK_RUN"] is None
        else:
            rest = [os.pathsep + given["PYTHONPATH"]] if path else [""]
            assert (
                here == child == {"PYTHONPATH": settings.DIRECTORY + rest[0], "AUTOPACK_RUN": "1"}
            )


def test_a_sitecustomize_that_fails_is_reported_by_python(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    stock, packed = both("crash.py", "7", PYTHONPATH=str(tmp_path))
    assert "RuntimeError: mine" in stock.err
    # Once more for the command itself, which is a Python process too.
    assert packed.err.removesuffix(start(*RUN, "crash.py", "7").err) == stock.err * 2


def test_interpreter_flags_are_kept():
    view, _, _ = json.loads(start("-W", "ignore", "-O", "-X", "utf8", *RUN, "view.py").out)
    assert (
        view["flags"]
        == json.loads(start("-W", "ignore", "-O", "-X", "utf8", "view.py").out)[0]["flags"]
    )


def test_an_interpreter_that_cannot_import_autopack_runs_the_script_and_says_so_once(tmp_path):
    (tmp_path / "autopack.py").write_text("from __future__ import what_is_yet_to_come\n")
    reached = {settings.RUN: "1", "PYTHONPATH": settings.with_directory(str(tmp_path))}
    assert start("crash.py", "7", **reached) == (7, "", "")
    named = f"import os, sys; os.environ['{settings.STARTED}'] = str(os.getpid())\n"
    done = start(
        "-c", named + "os.execv(sys.executable, [sys.executable, 'crash.py', '7'])", **reached
    )
    assert done.status == 7
    assert done.err == (
        f"autopack: not started, {sys.executable} cannot import it: "
        "future feature what_is_yet_to_come is not defined (autopack.py, line 1)\n"
    )


def test_a_process_that_does_not_ask_for_transformers_imports_next_to_nothing():
    done = start(
        "-c",
        "import sys; print(*sys.modules)",
        **{settings.RUN: "1", "PYTHONPATH": settings.DIRECTORY},
    )
    assert "autopack.launch.launcher" in done.out.split()
    assert not {"torch", "transformers", "wrapt", "numpy", "asyncio"} & set(done.out.split())


def test_variables_and_options_reach_the_model_and_an_option_overrides_a_variable():
    options = ("--no-quiet", "--check-every", "2")
    (line,) = start(*RUN, *options, "loop.py", AUTOPACK_UNPAD="no", AUTOPACK_QUIET="1").lines
    assert "padded batches stay as they come; trained: 4 calls" in line
    assert "; checked: every 2 training calls; " in line


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        ([], {}, "there is nothing to run"),
        (["--strict"], {}, "there is nothing to run"),
        (["no/such.py"], {}, "there is no file no/such.py"),
        (["no_such"], {}, "a module is run with -m"),
        (["."], {}, "nor a directory with a __main__.py"),
        (
            ["--no-subprocesses", "-m", "torch.distributed.run"],
            {},
            "--no-subprocesses leaves those out",
        ),
        (["view.py"], {"AUTOPACK_BACKEND": "fast"}, "AUTOPACK_BACKEND must be auto or eager"),
        (
            ["view.py"],
            {"AUTOPACK_CHECK_EVERY": "often"},
            "AUTOPACK_CHECK_EVERY must be a whole number; found 'often'",
        ),
        (
            ["view.py"],
            {"AUTOPACK_STRICT": "maybe"},
            "AUTOPACK_STRICT must be yes or 1 or true or on or no or 0",
        ),
    ],
)
def test_what_cannot_be_run_exits_with_2(arguments, given, said, monkeypatch, capsys):
    monkeypatch.chdir(directory())
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_interpreter_that_would_not_start_autopack_is_refused():
    done = start("-I", *RUN, "view.py")
    assert (done.status, done.out) == (2, "")
    assert "-I, -E or -S and would not read PYTHONPATH or import sitecustomize" in done.err
