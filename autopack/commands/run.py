"""Run a script as it is, with every model enabled that it trains.

Every transformers model that a Python script or program trains is enabled by itself when it is
first called in training: padded batches run without their padding, and packed rows are exact. That
holds in processes that it starts too, so torchrun, python -m torch.distributed.run and accelerate
launch work. A model that cannot be served runs as it would have. At exit, stderr gets a line for
every model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from autopack.errors import AutopackError
from autopack.launch import settings

USAGE = """autopack run [options] SCRIPT.py ARGS...
       autopack run [options] -m MODULE ARGS...
       autopack run [options] torchrun ARGS...   (or any other program)"""
_LAUNCHERS = {"accelerate", "deepspeed", "torch", "torchrun"}
"""Programs and packages that train only in processes that they start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "Options stand before the script; each can be given as an environment variable instead "
        "(AUTOPACK_BACKEND,\nAUTOPACK_STRICT=1 ...), which the option overrides. The exit status "
        "is that of the script, and 2 where it\ncould not be started.\n\n  autopack run train.py "
        "--epochs 3\n  autopack run --strict torchrun --nproc-per-node 2 train.py"
    )
    for option in settings.OPTIONS:
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if option.choices:
            form = {"choices": option.choices}
        elif option.metavar is not None:
            form = {"type": option.number, "metavar": option.metavar}
        said = f"{option.help} (default: {option.default})"
        parser.add_argument(option.flag, default=None, help=said, **form)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module, as in `python -m`"
    )
    # One argument and not two, for argparse would take a `--` that follows the script away.
    parser.add_argument(
        "command_line",
        metavar="SCRIPT ARGS",
        nargs=argparse.REMAINDER,
        help="a file, a module with -m, or a program on PATH; what follows it is its own",
    )


def run(args: argparse.Namespace) -> int:
    """Replace this process by the script's, with autopack in it, or return its status (Windows).

    Returns only where the system cannot replace a process, with the script's exit status.
    """
    script, *arguments = args.command_line[args.command_line[:1] == ["--"] :] or [""]
    if not script:
        raise AutopackError(
            "there is nothing to run; name a script, a program, or -m MODULE", code="cannot-run"
        )
    command = [*_command(script, args.is_module), *arguments]
    launches = (script.partition(".")[0] if args.is_module else Path(script).name) in _LAUNCHERS
    environment = _environment(args, script if launches else "")
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "posix":
        return subprocess.call(command, env=environment)
    # The process keeps its id, by which the script is told from processes that it starts.
    environment[settings.STARTED] = str(os.getpid())
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        raise AutopackError(
            f"cannot start {command[0]}: {error.strerror}", code="cannot-run"
        ) from error


def _command(script: str, is_module: bool) -> list[str]:
    """Return the command that starts a script, module or program; raise if there is none."""
    path = Path(script)
    if is_module:
        return [*_interpreter(), "-m", script]
    if _runs_by_itself(path):
        return [str(path.absolute())]
    if path.is_file() or (path / "__main__.py").is_file():
        return [*_interpreter(), script]
    if (program := shutil.which(script)) is not None:
        return [program]
    raise AutopackError(
        f"there is no file {script} to run, nor a directory with a __main__.py, and no program of "
        "that name on PATH; a module is run with -m",
        code="cannot-run",
    )


def _runs_by_itself(path: Path) -> bool:
    """Return True for an executable file not named .py that has a `#!` line or is binary."""
    if path.suffix.startswith(".py") or not path.is_file() or not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        start = file.read(64)
    return start.startswith(b"#!") or b"\0" in start


def _interpreter() -> list[str]:
    """Return the command of this Python with its flags; raise if they keep autopack out."""
    if not sys.executable:
        raise AutopackError(
            "this Python does not know its own executable (sys.executable is empty)",
            code="cannot-run",
        )
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        raise AutopackError(
            "this Python runs with -I, -E or -S and would not read PYTHONPATH or import "
            "sitecustomize, by which autopack starts in the script; run it without, as in `python "
            "-m autopack run ...`",
            code="cannot-run",
        )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags]


def _environment(args: argparse.Namespace, launcher: str) -> dict[str, str]:
    """Return the script's environment, by which autopack starts in it; raise if that is impossible.

    It holds these options. `launcher` names the script if it trains only in processes that it
    starts, else it is "".
    """
    environment = dict(os.environ)
    for option in settings.OPTIONS:
        if (value := getattr(args, option.name)) is not None:
            environment[option.variable] = option.write(value)
    told = settings.RunSettings.read(environment)
    if launcher and not told.subprocesses:
        raise AutopackError(
            f"{launcher} trains in processes that it starts, and --no-subprocesses leaves those "
            "out; drop it",
            code="bad-option",
        )
    if os.pathsep in settings.DIRECTORY:
        raise AutopackError(
            f"PYTHONPATH cannot hold {settings.DIRECTORY}, where autopack is: it has a "
            f"{os.pathsep} in it; install autopack elsewhere",
            code="cannot-run",
        )
    environment["PYTHONPATH"] = settings.with_directory(os.environ.get("PYTHONPATH", ""))
    environment[settings.RUN] = "1"
    return environment
