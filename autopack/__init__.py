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
    "Plan": "autopack.packing.plans",
    "SiteDrift": "autopack.errors",
    "TrainerHandle": "autopack.enabling.handle",
    "UnsupportedModel": "autopack.errors",
    "UnsupportedVersion": "autopack.errors",
    "audit": "autopack.auditing.auditor",
    "chunked_loss": "autopack.packing.chunked_loss",
    "disable": "autopack.enabling.enable",
    "enable": "autopack.enabling.enable",
    "estimate": "autopack.packing.estimate",
    "families": "autopack.registry",
    "is_enabled": "autopack.enabling.enable",
    "pack": "autopack.packing.dataset",
    "pack_shards": "autopack.packing.shards",
    "pair_lengths": "autopack.packing.pairs",
    "plan": "autopack.packing.plans",
    "register": "autopack.registry",
    "shard_files": "autopack.packing.shards",
    "shard_rows": "autopack.packing.sequence_parallel",
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
    # Each under its own name once more, by which type checkers know that it is meant for users.
    from autopack.auditing.auditor import audit as audit
    from autopack.auditing.report import LeakReport as LeakReport
    from autopack.enabling.enable import disable as disable
    from autopack.enabling.enable import enable as enable
    from autopack.enabling.enable import is_enabled as is_enabled
    from autopack.enabling.handle import Handle as Handle
    from autopack.enabling.handle import Handles as Handles
    from autopack.enabling.handle import TrainerHandle as TrainerHandle
    from autopack.errors import AutopackError as AutopackError
    from autopack.errors import InvalidPacking as InvalidPacking
    from autopack.errors import LeakDetected as LeakDetected
    from autopack.errors import OutsideForward as OutsideForward
    from autopack.errors import SiteDrift as SiteDrift
    from autopack.errors import UnsupportedModel as UnsupportedModel
    from autopack.errors import UnsupportedVersion as UnsupportedVersion
    from autopack.family import Family as Family
    from autopack.layout.host import HostBatch as HostBatch
    from autopack.layout.packed import PackedLayout as PackedLayout
    from autopack.packing import PackingCollator as PackingCollator
    from autopack.packing.balance import CostModel as CostModel
    from autopack.packing.chunked_loss import chunked_loss as chunked_loss
    from autopack.packing.dataset import pack as pack
    from autopack.packing.estimate import estimate as estimate
    from autopack.packing.loss import weigh_documents as weigh_documents
    from autopack.packing.loss import weighted_loss as weighted_loss
    from autopack.packing.pairs import pair_lengths as pair_lengths
    from autopack.packing.pairs import weigh_pairs as weigh_pairs
    from autopack.packing.plans import Plan as Plan
    from autopack.packing.plans import plan as plan
    from autopack.packing.sampler import PackedBatchSampler as PackedBatchSampler
    from autopack.packing.sequence_parallel import shard_rows as shard_rows
    from autopack.packing.shards import pack_shards as pack_shards
    from autopack.packing.shards import shard_files as shard_files
    from autopack.registry import families as families
    from autopack.registry import register as register
