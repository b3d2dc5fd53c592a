"""The packages whose kernels are interpreted, in a directory of their own: where transformers finds them, it uses them.

Those with C++ and CUDA in them are installed without it, by the switches of their own setup scripts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from compat.environments import cache_directory
from compat.matrix import ROOT, CompatError

PINS = ("triton==3.9.0", "fla-core==0.6.0", "einops==0.8.2", "liger-kernel==0.8.5")
SOURCES = ("mamba-ssm==2.3.2.post1", "causal-conv1d==1.7.0", "flash-attn==2.8.3.post2")
_SWITCHES = {
    f"{package}_{switch}": "TRUE"
    for package in ("MAMBA", "CAUSAL_CONV1D", "FLASH_ATTENTION")
    for switch in ("SKIP_CUDA_BUILD", "FORCE_BUILD")  # the second: no look for a built wheel, by a version of CUDA
}


def directory() -> Path:
    """Where the packages are; they are installed the first time. About 1 GB, of which Triton is the most."""
    cache = cache_directory()
    pins = "\n".join([*PINS, *SOURCES])
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    path = cache / f"kernels-{python}-{hashlib.sha256(pins.encode()).hexdigest()[:10]}"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n", encoding="utf-8")
    with FileLock(cache / "kernels.lock"):  # several test processes come at once
        if not path.is_dir():
            with tempfile.TemporaryDirectory(prefix="kernels.", suffix=".part", dir=cache) as scratch:
                part = Path(scratch) / "packages"
                _install(part, PINS)
                _install(part, SOURCES, "--no-build-isolation")
                for stale in cache.glob(f"kernels-{python}-*"):
                    shutil.rmtree(stale)
                part.rename(path)
    return path


def _install(target: Path, pins: tuple[str, ...], *options: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    command += [*options, "--target", str(target), *pins]
    done = subprocess.run(command, env={**os.environ, **_SWITCHES}, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise CompatError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{tail}")


def environ() -> dict[str, str]:
    """The environment variables of a process that uses them."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    switches = {"TRITON_INTERPRET": "1", "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE", "OMP_NUM_THREADS": "1"}
    return {**kept, **switches, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(directory()), str(ROOT)])}
