"""The packages whose kernels are interpreted, in a directory of their own: where transformers finds
them, it uses them.

Those with C++ and CUDA in them are installed without it, by the switches of their own setup
scripts."""

from __future__ import annotations

import os

from filelock import FileLock

from compat.environments import cache_directory, directory_of, environ_of

PINS = ("triton==3.9.0", "fla-core==0.6.0", "einops==0.8.2", "liger-kernel==0.8.5")
SOURCES = ("mamba-ssm==2.3.2.post1", "causal-conv1d==1.7.0", "flash-attn==2.8.3.post2")
_SWITCHES = {
    f"{package}_{switch}": "TRUE"
    for package in ("MAMBA", "CAUSAL_CONV1D", "FLASH_ATTENTION")
    # the second: no look for a built wheel, by a version of CUDA
    for switch in ("SKIP_CUDA_BUILD", "FORCE_BUILD")
}


def environ() -> dict[str, str]:
    """The environment variables of a process that uses them; they are installed the first time.

    About 1 GB, of which Triton is the most.
    """
    installs = PINS, ("--no-build-isolation", *SOURCES)
    with FileLock(cache_directory() / "kernels.lock"):  # several test processes come at once
        directory = directory_of("kernels", *installs, environ={**os.environ, **_SWITCHES})
    return environ_of(directory, TRITON_INTERPRET="1", FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE")
