"""Where cells are measured: a directory of packages for each release of transformers, an
environment for a torch.

A release differs from others by transformers, tokenizers and huggingface-hub (about 50 MB), which
are put before the packages of the running interpreter: torch and the rest are its. Packages that
cannot use an older huggingface-hub come from the pins of `[support]`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from compat.matrix import COMPAT, ROOT, CompatError, Line, Matrix, Release, tomllib

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
_NEEDS = ("tqdm", "packaging", "tomli; python_version < '3.11'")
"""What the code that measures imports beside what autopack does."""


def cache_directory() -> Path:
    """Where directories and logs are kept: $AUTOPACK_COMPAT_CACHE, or
    compat/.envs."""
    chosen = os.environ.get("AUTOPACK_COMPAT_CACHE")
    cache = Path(chosen).expanduser().resolve() if chosen else COMPAT / ".envs"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    return cache


def check_interpreter(matrix: Matrix) -> None:
    """Raise `CompatError` where the running interpreter has another torch than the pinned one."""
    found = metadata.version("torch")
    if found.partition("+")[0] != matrix.torch:
        raise CompatError(
            f"{sys.executable} has torch {found}, and the matrix is measured with {matrix.torch}: "
            f"pip install torch=={matrix.torch}"
        )


def environ_of(*directories: Path, **more: str) -> dict[str, str]:
    """The variables of a process that sees these directories and the project: nothing of the
    caller's can shadow them.

    Tiny models gain nothing from threads, and those of several processes spin against each other.
    """
    theirs = ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in theirs}
    same = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONNOUSERSITE": "1",
    }
    return {**kept, **same, "PYTHONPATH": os.pathsep.join(map(str, (*directories, ROOT))), **more}


def pip(python: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
    """Install packages; raises `CompatError` with the end of what pip says where it fails."""
    options = "-m pip install --disable-pip-version-check --no-compile"
    command = [python, *options.split(), *arguments]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise CompatError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{tail}")


def directory_of(
    family: str, *installs: Sequence[str], environ: Mapping[str, str] | None = None
) -> Path:
    """A cached directory of packages, keyed by what pip is asked for; an interrupted build is made
    again."""
    cache = cache_directory()
    asked = hashlib.sha256(repr(installs).encode()).hexdigest()[:10]
    path = cache / f"{family}-py{HERE}-{asked}"
    if not path.is_dir():
        with tempfile.TemporaryDirectory(prefix=f"{family}.", suffix=".part", dir=cache) as scratch:
            part = Path(scratch) / "packages"
            for install in installs:
                pip(sys.executable, "--no-deps", "--target", str(part), *install, environ=environ)
            for stale in cache.glob(f"{family}-py{HERE}-*/"):
                shutil.rmtree(stale)
            part.rename(path)
    return path


class Environment:
    """One release, run by this interpreter; nothing is made before `build`."""

    python = sys.executable

    def __init__(self, matrix: Matrix, release: Release) -> None:
        self.release, self.name = release, release.transformers
        self.log = cache_directory() / f"{self.name}.log"
        own = release.hub == metadata.version("huggingface-hub")
        self._packages = [
            *release.pins,
            *([] if own else (f"{name}=={v}" for name, v in matrix.support.items())),
        ]
        self.path = Path()

    def build(self) -> None:
        """Make the directory unless it is there."""
        if not SpecifierSet(self.release.python).contains(HERE):
            raise CompatError(
                f"transformers {self.name} is listed for Python {self.release.python}, and "
                f"{sys.executable} is Python {HERE}. Run the matrix with another one."
            )
        self.path = directory_of(self.name, self._packages)

    def environ(self) -> dict[str, str]:
        """The variables of a process that runs in it."""
        return environ_of(self.path)


class TorchEnvironment:
    """The virtual environment of one line of [torches]; nothing is made before `build`."""

    def __init__(self, matrix: Matrix, line: Line) -> None:
        self.line, self.name = line, line.name
        (self.release,) = matrix.select([line.transformers])
        self.path = cache_directory() / f"torch-{line.torch}-py{line.python}"
        self.log = self.path.with_suffix(".log")
        self.python = str(self.path / "bin" / "python")

    def build(self) -> None:
        """Make it. Raises `CompatError` where there is no such Python, or pip does not find a
        package for it."""
        python = shutil.which(f"python{self.line.python}")
        if python is None:
            raise CompatError(f"no Python {self.line.python} on this machine")
        subprocess.run([python, "-m", "venv", "--clear", str(self.path)], check=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needs = [*self.release.pins, *project["dependencies"], *_NEEDS]
        pip(self.python, "--no-cache-dir", f"torch=={self.line.torch}", *needs)

    def environ(self) -> dict[str, str]:
        """The variables of a process that runs in it."""
        return environ_of(PYTHONDONTWRITEBYTECODE="1")
