"""Exact packing for Hugging Face models: ``autopack.enable(model)``.

Importing this package imports neither torch nor transformers and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopack.version import __version__, refuse_old

_PUBLIC = {
    "AutopackError": "autopack.errors",
    "CostModel": "autopack.packing.balance",
    "Family": "autopack.family",
    "Handle": "autopack.enabling.handle",
    "Handles": "autopack.enabling.handle",
    "HostBatch": "autopack.layout.host",
    "InvalidPacking": "autopack.errors",
    "LeakDetected": "autopack.errors",
    "LeakReport": "autopack.auditing.report",
    "OutsideForward": "autopack.errors",
    "PackedBatchSampler": "autopack.packing.sampler",
    "PackedLayout": "autopack.layout.packed",
    "PackingCollator": "autopack.packing",
    "Plan": "autopack.packing.plan",
    "SiteDrift": "autopack.errors",
    "TrainerHandle": "autopack.enabling.handle",
    "UnsupportedModel": "autopack.errors",
    "UnsupportedVersion": "autopack.errors",
    "audit": "autopack.auditing.auditor",
    "disable": "autopack.enabling.enable",
    "enable": "autopack.enabling.enable",
    "estimate": "autopack.packing.estimate",
    "families": "autopack.registry",
    "is_enabled": "autopack.enabling.enable",
    "pack": "autopack.packing.dataset",
    "pack_shards": "autopack.packing.shards",
    "pair_lengths": "autopack.packing.pairs",
    "plan": "autopack.packing.plan",
    "register": "autopack.registry",
    "shard_files": "autopack.packing.shards",
    "weigh_documents": "autopack.packing.loss",
    "weigh_pairs": "autopack.packing.pairs",
    "weighted_loss": "autopack.packing.loss",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'autopack' has no attribute {name!r}")
    if _PUBLIC[name] != "autopack.errors":
        refuse_old()
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from autopack.auditing.auditor import audit
    from autopack.auditing.report import LeakReport
    from autopack.enabling.enable import disable, enable, is_enabled
    from autopack.enabling.handle import Handle, Handles, TrainerHandle
    from autopack.errors import (
        AutopackError,
        InvalidPacking,
        LeakDetected,
        OutsideForward,
        SiteDrift,
        UnsupportedModel,
        UnsupportedVersion,
    )
    from autopack.family import Family
    from autopack.layout.host import HostBatch
    from autopack.layout.packed import PackedLayout
    from autopack.packing import PackingCollator
    from autopack.packing.balance import CostModel
    from autopack.packing.dataset import pack
    from autopack.packing.estimate import estimate
    from autopack.packing.loss import weigh_documents, weighted_loss
    from autopack.packing.pairs import pair_lengths, weigh_pairs
    from autopack.packing.plan import Plan, plan
    from autopack.packing.sampler import PackedBatchSampler
    from autopack.packing.shards import pack_shards, shard_files
    from autopack.registry import families, register
