"""One cached virtual environment per transformers version, and the running interpreter where it fits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from compat.matrix import COMPAT, ROOT, CompatError, Matrix, Version, python_in_range


def say(text: str) -> None:
    """Prints a line at once, so that a log shows where a long run is."""
    print(text, flush=True)


@dataclass(frozen=True)
class Interpreter:
    """The Python that environments are made with."""

    path: str
    version: tuple[int, int]

    @classmethod
    def at(cls, path: str) -> Interpreter:
        """Asks the interpreter at `path` for its version."""
        if path == sys.executable:
            return cls(path, sys.version_info[:2])
        code = "import sys; print(*sys.version_info[:2])"
        try:
            answer = subprocess.run([path, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompatError(f"--python {path} does not run: {error}") from error
        major, minor = answer.stdout.split()
        return cls(path, (int(major), int(minor)))


def cache_directory() -> Path:
    """Where environments and logs are kept: $AUTOPACK_COMPAT_CACHE, or compat/.envs."""
    chosen = os.environ.get("AUTOPACK_COMPAT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else COMPAT / ".envs"


def environment_name(matrix: Matrix, version: Version, python: tuple[int, int]) -> str:
    """The directory name of a version's environment; it changes with every pin, so that a change rebuilds."""
    digest = hashlib.sha256("\n".join(matrix.requirements(version)).encode()).hexdigest()[:10]
    return f"{_family(version, python)}-{digest}"


def _family(version: Version, python: tuple[int, int]) -> str:
    return f"{version.transformers}-py{python[0]}{python[1]}"


class Environment:
    """The cached virtual environment of one version; nothing is made before `build`."""

    def __init__(self, matrix: Matrix, version: Version, interpreter: Interpreter, cache: Path) -> None:
        self.requirements = matrix.requirements(version)
        self.version = version
        self.interpreter = interpreter
        self.cache = cache
        self.path = cache / environment_name(matrix, version, interpreter.version)
        self.log = cache / f"{self.path.name}.log"
        # Written last, so that an interrupted build is redone.
        self.stamp = self.path / "autopack-compat.json"
        self.python = self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def ready(self) -> bool:
        """Whether the pinned packages are installed completely."""
        return self.stamp.is_file()

    def build(self, rebuild: bool = False) -> None:
        """Makes the environment unless it is there, and installs autopack from the working tree into it."""
        if not python_in_range(self.version.python, self.interpreter.version):
            found = ".".join(map(str, self.interpreter.version))
            raise CompatError(
                f"transformers {self.version.transformers} is listed for Python {self.version.python}, and "
                f"{self.interpreter.path} is Python {found}. Name another interpreter with --python."
            )
        if rebuild or not self.ready:
            self._install_pins()
        self._install_autopack()

    def _install_pins(self) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        ignore = self.cache / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        for stale in self.cache.glob(f"{_family(self.version, self.interpreter.version)}-*"):
            if stale.is_dir():
                shutil.rmtree(stale)
            else:
                stale.unlink()
        say(f"{self.version.transformers}: building the environment (log: {self.log})")
        self._logged([self.interpreter.path, "-m", "venv", str(self.path)])
        # torch on its own first: whatever the other packages ask for, it is then there and stays.
        self._pip(self.requirements[0])
        self._pip(*self.requirements)
        self._logged([str(self.python), "-c", "import torch, transformers"])
        self.stamp.write_text(json.dumps({"requirements": self.requirements}, indent=1), encoding="utf-8")

    def _install_autopack(self) -> None:
        """Installs the working tree editable; the pins are constraints, so bounds that exclude them are an error."""
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        digest = hashlib.sha256(f"{ROOT}\n{project}".encode()).hexdigest()
        stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
        if stamp.get("autopack") == digest:
            return
        constraints = self.path / "constraints.txt"
        constraints.write_text("\n".join(self.requirements) + "\n", encoding="utf-8")
        self._pip("--constraint", str(constraints), "--editable", str(ROOT))
        self.stamp.write_text(json.dumps({**stamp, "autopack": digest}, indent=1), encoding="utf-8")

    def _pip(self, *arguments: str) -> None:
        self._logged([str(self.python), "-m", "pip", "install", "--disable-pip-version-check", *arguments])

    def _logged(self, command: Sequence[str]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise CompatError(
                f"the environment could not be made: `{' '.join(command)}` ended with status {done.returncode}. "
                f"The log {self.log} ends with\n{tail}"
            )


def current_interpreter_serves(matrix: Matrix, version: Version) -> bool:
    """Whether the running interpreter holds this transformers, the pinned torch, pytest and autopack."""
    try:
        found = {name: metadata.version(name) for name in ("transformers", "torch", "pytest", "autopack")}
    except metadata.PackageNotFoundError:
        return False
    return found["transformers"] == version.transformers and found["torch"].partition("+")[0] == matrix.torch
