"""The device that parts run on: its memory, and what stands in for its kernels on a CPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
GIB = 2**30
_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "fla-core",
    "flash-attn",
    "causal-conv1d",
    "mamba-ssm",
    "numpy",
)


@dataclass(frozen=True)
class Machine:
    """A CUDA device, or a CPU on which stand-ins compute what its kernels do; times of the latter
    mean nothing."""

    device: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.startswith("cuda")

    def free(self) -> float | None:
        """GiB that could be had now, after giving back what is only cached; None on a CPU."""
        if not self.is_cuda:
            return None
        self.forget()
        return torch.cuda.mem_get_info()[0] / GIB

    def forget(self) -> None:
        """Give cached memory back."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """What stands in for kernels of torch that the device lacks."""
        from compat.torch_flash import aten_on_cpu

        return contextlib.nullcontext() if self.is_cuda else aten_on_cpu()

    @contextlib.contextmanager
    def flash(self) -> Iterator[str]:
        """Make kernels of FlashAttention loadable; says which they are."""
        from compat.torch_flash import torch_kernels_as_flash_attn

        if self.is_cuda and _has_flash_attn():
            yield f"flash-attn {_version('flash-attn')}"
            return
        with torch_kernels_as_flash_attn():
            yield f"torch's kernels behind flash-attn's signature{'' if self.is_cuda else ', stood in for on a CPU'}"

    def about(self) -> dict[str, Any]:
        """The device, its driver, and the packages that a result depends on."""
        found: dict[str, Any] = {
            "device": self.device,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _version(name) for name in _PACKAGES},
        }
        if not self.is_cuda:
            return {**found, "name": "CPU stand-ins: no time or memory of this run means anything"}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            **found,
            "name": properties.name,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(self.device))),
            "multiprocessors": properties.multi_processor_count,
            "memory, GiB": properties.total_memory / GIB,
            "free, GiB": self.free(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }


def _short(filename: str) -> str:
    path = Path(filename)
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return str(
        Path(*path.parts[path.parts.index("site-packages") + 1 :])
        if "site-packages" in path.parts
        else path
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_flash_attn() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return importlib.util.find_spec("flash_attn") is not None and bool(is_flash_attn_2_available())


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()[0]
    except (subprocess.SubprocessError, IndexError):
        return None
