"""Exact packing for Hugging Face models: ``autopack.enable(model)``.

Importing this package imports neither torch nor transformers and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopack.launch import lines as _lines
from autopack.version import __version__, refuse_old

_lines.prepare()

_PUBLIC = {
    "AutopackError": "autopack.errors",
    "Handle": "autopack.enabling.handle",
    "InvalidPacking": "autopack.errors",
    "LeakDetected": "autopack.errors",
    "PackedBatchSampler": "autopack.packing.sampler",
    "PackingCollator": "autopack.packing",
    "UnsupportedModel": "autopack.errors",
    "audit": "autopack.auditing.auditor",
    "disable": "autopack.enabling.enable",
    "enable": "autopack.enabling.enable",
    "estimate": "autopack.bench.estimate",
    "is_enabled": "autopack.enabling.enable",
    "micro_batches": "autopack.steps.step",
    "pack": "autopack.packing",
}
_ROOMS = ("errors", "packing", "registry", "testing")
"""Modules with more names for users: `autopack.packing.plan` needs no import of its own."""

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"autopack.{name}")
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'autopack' has no attribute {name!r}")
    if home != "autopack.errors":
        refuse_old()
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]


if TYPE_CHECKING:
    # Each under its own name once more, by which type checkers know that it is meant for users.
    from autopack import errors as errors
    from autopack import packing as packing
    from autopack import registry as registry
    from autopack import testing as testing
    from autopack.auditing.auditor import audit as audit
    from autopack.bench.estimate import estimate as estimate
    from autopack.enabling.enable import disable as disable
    from autopack.enabling.enable import enable as enable
    from autopack.enabling.enable import is_enabled as is_enabled
    from autopack.enabling.handle import Handle as Handle
    from autopack.errors import AutopackError as AutopackError
    from autopack.errors import InvalidPacking as InvalidPacking
    from autopack.errors import LeakDetected as LeakDetected
    from autopack.errors import UnsupportedModel as UnsupportedModel
    from autopack.packing import PackingCollator as PackingCollator
    from autopack.packing import pack as pack
    from autopack.packing.sampler import PackedBatchSampler as PackedBatchSampler
    from autopack.steps.step import micro_batches as micro_batches
