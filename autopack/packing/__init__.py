"""Packing: assign examples to rows, and make the packed rows. Imports neither torch nor
transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopack.packing.collator import PackingCollator
from autopack.packing.plans import Plan, plan
from autopack.packing.sampler import PackedBatchSampler
from autopack.packing.strategies import CostModel

if TYPE_CHECKING:
    from autopack.layout.host import HostBatch
    from autopack.layout.packed import PackedLayout
    from autopack.layout.row_parts import shard_rows
    from autopack.packing.dataset import pack
    from autopack.packing.loss import weighted_loss
    from autopack.packing.shards import pack_shards, shard_files

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
_LATER = {
    "HostBatch": "autopack.layout.host",
    "PackedLayout": "autopack.layout.packed",
    "pack": "autopack.packing.dataset",
    "pack_shards": "autopack.packing.shards",
    "shard_files": "autopack.packing.shards",
    "shard_rows": "autopack.layout.row_parts",
    "weighted_loss": "autopack.packing.loss",
}
"""Names whose modules import torch or pyarrow."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'autopack.packing' has no attribute {name!r}")
    try:
        return getattr(import_module(_LATER[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f'{name} needs {error.name}: pip install "autopack[data]"') from error
