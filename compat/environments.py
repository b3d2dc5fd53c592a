"""One cached directory of packages per release of transformers, put before those of the running interpreter.

transformers, tokenizers and huggingface-hub are all that differs between releases (about 50 MB); torch and the rest are
the interpreter's. Whatever else a release asks for and the interpreter cannot give comes from the pins of `[support]`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from compat.matrix import COMPAT, ROOT, CompatError, Matrix, Release, python_in_range

HERE = sys.version_info[:2]
_FORMAT = 1
"""Of the directory; another number makes all of them anew."""


def cache_directory() -> Path:
    """Where directories, finished cells and logs are kept: $AUTOPACK_COMPAT_CACHE, or compat/.envs."""
    chosen = os.environ.get("AUTOPACK_COMPAT_CACHE")
    return Path(chosen).expanduser().resolve() if chosen else COMPAT / ".envs"


def check_interpreter(matrix: Matrix) -> None:
    """Raise `CompatError` where the running interpreter has another torch than the pinned one."""
    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:
        found = "none"
    if found.partition("+")[0] != matrix.torch:
        raise CompatError(
            f"{sys.executable} has torch {found}, and the matrix is measured with {matrix.torch}: "
            f"pip install torch=={matrix.torch}"
        )


class Environment:
    """The cached directory of one release; nothing is made before `build`."""

    def __init__(self, matrix: Matrix, release: Release, cache: Path) -> None:
        self.release, self.support, self.cache = release, matrix.support, cache
        self.python = sys.executable
        self._family = f"{release.transformers}-py{HERE[0]}{HERE[1]}"
        pins = "\n".join([str(_FORMAT), *release.pins, *(f"{n}=={v}" for n, v in sorted(matrix.support.items()))])
        self.path = cache / f"{self._family}-{hashlib.sha256(pins.encode()).hexdigest()[:10]}"
        self.log = cache / f"{self.path.name}.log"
        # Written last, so that an interrupted build is redone.
        self.stamp = self.path / "autopack-compat.json"

    @property
    def ready(self) -> bool:
        """Whether the pinned packages are installed completely."""
        return self.stamp.is_file()

    def environ(self) -> dict[str, str]:
        """The environment variables of a process that runs in this release: nothing of the caller's can shadow it."""
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        environ["PYTHONPATH"] = os.pathsep.join([str(self.path), str(ROOT)])
        environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONNOUSERSITE="1")
        # Tiny models gain nothing from threads, and those of several processes spin against each other.
        environ["OMP_NUM_THREADS"] = "1"
        return environ

    def build(self, rebuild: bool = False) -> None:
        """Make the directory unless it is there."""
        if not python_in_range(self.release.python, HERE):
            raise CompatError(
                f"transformers {self.release.transformers} is listed for Python {self.release.python}, and "
                f"{sys.executable} is Python {HERE[0]}.{HERE[1]}. Run the matrix with another one."
            )
        if self.ready and not rebuild:
            return
        self.cache.mkdir(parents=True, exist_ok=True)
        (self.cache / ".gitignore").write_text("*\n", encoding="utf-8")
        self.log.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{self._family}.", suffix=".part", dir=self.cache) as scratch:
            part = Path(scratch) / "packages"
            self._install(part, self.release.pins)
            while missing := sorted(_unmet(part, self.support)):
                self._install(part, [self._pinned(name) for name in missing])
            packages = sorted(f"{found.name}=={found.version}" for found in _installed(part))
            (part / self.stamp.name).write_text(json.dumps({"packages": packages}, indent=1), encoding="utf-8")
            for stale in self.cache.glob(f"{self._family}-*"):
                if stale.is_dir():
                    shutil.rmtree(stale)
            part.rename(self.path)

    def _pinned(self, name: str) -> str:
        for known, version in self.support.items():
            if canonicalize_name(known) == name:
                return f"{known}=={version}"
        raise CompatError(
            f"transformers {self.release.transformers} needs {name}, which {sys.executable} lacks or has in another "
            "version. Pin it in [support] of matrix.toml."
        )

    def _install(self, target: Path, requirements: Sequence[str]) -> None:
        # Bytecode is compiled as modules are imported: most of transformers' thousands never are.
        options = ["--disable-pip-version-check", "--no-deps", "--no-compile", "--target", str(target)]
        self._logged([sys.executable, "-m", "pip", "install", *options, *requirements])

    def _logged(self, command: Sequence[str]) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise CompatError(
                f"the packages of transformers {self.release.transformers} could not be installed: "
                f"`{' '.join(command)}` ended with status {done.returncode}. The log {self.log} ends with\n{tail}"
            )


def _installed(directory: Path) -> list[metadata.Distribution]:
    return list(metadata.distributions(path=[str(directory)]))


def _unmet(directory: Path, support: Iterable[str]) -> set[str]:
    """What a directory lacks.

    That is what its packages ask for, directly or not, and neither it nor the interpreter can give; and what of the
    support the interpreter has in a version that cannot use those packages.
    """
    unmet: set[str] = set()
    seen: set[str] = set()
    waiting: list[str] = [canonicalize_name(found.name) for found in _installed(directory)]
    while waiting:
        found = _distribution(waiting.pop(), directory)
        assert found is not None
        for name, fits in _needs(found, directory):
            if name not in seen:
                seen.add(name)
                (waiting.append if fits else unmet.add)(name)
    for name in map(canonicalize_name, support):
        found = _distribution(name, directory)
        if found is not None and not all(fits for _, fits in _needs(found, directory)):
            unmet.add(name)
    return unmet.difference(canonicalize_name(found.name) for found in _installed(directory))


def _needs(package: metadata.Distribution, directory: Path) -> Iterator[tuple[str, bool]]:
    """What a package asks for, and whether what is there fits."""
    for line in package.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            name = canonicalize_name(wanted.name)
            found = _distribution(name, directory)
            yield name, found is not None and wanted.specifier.contains(found.version, prereleases=True)


def _distribution(name: str, directory: Path) -> metadata.Distribution | None:
    """A package as a process sees it that has the directory before the interpreter's own packages."""
    return next(iter(metadata.distributions(name=name, path=[str(directory), *sys.path])), None)
