"""Values of examples, as people have them: lists, arrays, tensors, numbers, text."""

from __future__ import annotations

import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["is_int", "is_text", "numbers"]


def numbers(value: Any) -> np.ndarray:
    """A list, array or tensor as a numpy array of int64, float32 or bool; raises `ValueError` for anything else."""
    try:
        if isinstance(value, (list, tuple)):
            with suppress(TypeError):  # not all ints; numpy alone is slower, and makes floats of [1, 2**63]
                return np.asarray(array.array("q", value))
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            value = (value.float() if value.is_floating_point() else value).numpy()
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"cannot be read as numbers ({error}); fix it, or name it in drop_keys") from error
    kind = found.dtype.kind
    if kind not in "biuf" or (kind == "u" and found.size and found.max() > np.iinfo(np.int64).max):
        raise ValueError(f"found {found.dtype}, wanted int64, floats or bools; or name it in drop_keys")
    return found.astype({"b": np.bool_, "f": np.float32}.get(kind, np.int64), copy=False)


def is_text(value: Any) -> bool:
    """Whether a value is text or a mapping, or lists of them."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (str, bytes, Mapping)) or (isinstance(value, np.ndarray) and value.dtype.kind in "US")


def is_int(value: Any) -> bool:
    """Whether a value is an int, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
