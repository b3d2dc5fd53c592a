"""Whose a file of code is: transformers', torch's, that of what is integrated, autopack's own, or somebody else's."""

from __future__ import annotations

import os
import sys
import sysconfig

import torch
import transformers

HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
MODELING, TORCH = (os.path.dirname(str(package.__file__)) + os.sep for package in (transformers, torch))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_INTEGRATED = ("peft", "accelerate")
"""Packages whose code `autopack.integrations` knows, where they are installed and imported."""

_KERNELS = ("flash_attn", "flash_attn_interface")
"""Packages that `transformers.modeling_flash_attention_utils` takes its kernels from."""


def is_own_file(name: str) -> bool:
    """Whether a file is one of transformers, torch, the standard library, or a package that is integrated."""
    if name.startswith((MODELING, TORCH, HERE, "<frozen ")):
        return True
    if is_standard(name):
        return True
    found = (getattr(sys.modules.get(package), "__file__", None) for package in _INTEGRATED)
    return any(path is not None and name.startswith(os.path.dirname(path) + os.sep) for path in found)


def is_kernel_file(name: str) -> bool:
    """Whether a file is one of a package of attention kernels that transformers loads."""
    for package in _KERNELS:
        path = getattr(sys.modules.get(package), "__file__", None)
        # Flash-attention 3 is a module of its own, not a package.
        if path is not None and (name == path or (path.endswith("__init__.py") and name.startswith(path[:-11]))):
            return True
    return False


def is_standard(name: str) -> bool:
    """Whether a file is one of the standard library."""
    return name.startswith(_STDLIB) and not any(part in name for part in _PACKAGES)
