"""Packing: assign examples to rows, and make the packed rows. Imports neither torch nor
transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopack.packing.balance import CostModel
from autopack.packing.collator import PackingCollator
from autopack.packing.dataset import pack
from autopack.packing.plans import Plan, plan
from autopack.packing.sampler import PackedBatchSampler
from autopack.packing.shards import pack_shards, shard_files

if TYPE_CHECKING:
    from autopack.layout.host import HostBatch
    from autopack.layout.packed import PackedLayout
    from autopack.layout.row_parts import shard_rows
    from autopack.packing.loss import weighted_loss

__all__ = [
    "CostModel",
    "HostBatch",
    "PackedBatchSampler",
    "PackedLayout",
    "PackingCollator",
    "Plan",
    "pack",
    "pack_shards",
    "plan",
    "shard_files",
    "shard_rows",
    "weighted_loss",
]
_NEED_TORCH = {
    "HostBatch": "autopack.layout.host",
    "PackedLayout": "autopack.layout.packed",
    "shard_rows": "autopack.layout.row_parts",
    "weighted_loss": "autopack.packing.loss",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'autopack.packing' has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
