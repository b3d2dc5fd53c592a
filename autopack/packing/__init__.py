"""Packing: assign examples to rows, and make the packed rows. Imports neither torch nor
transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopack.packing.collator import PackingCollator as PackingCollator

_PUBLIC = {
    "CostModel": "autopack.packing.balance",
    "HostBatch": "autopack.layout.host",
    "PackedBatchSampler": "autopack.packing.sampler",
    "PackedLayout": "autopack.layout.packed",
    "Plan": "autopack.packing.plans",
    "pack": "autopack.packing.dataset",
    "pack_shards": "autopack.packing.shards",
    "pair_lengths": "autopack.packing.pairs",
    "pair_prefixes": "autopack.packing.pairs",
    "plan": "autopack.packing.plans",
    "shard_files": "autopack.packing.shards",
    "shard_rows": "autopack.layout.row_parts",
    "weighted_loss": "autopack.packing.loss",
}

__all__ = ["PackingCollator", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'autopack.packing' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


if TYPE_CHECKING:
    from autopack.layout.host import HostBatch as HostBatch
    from autopack.layout.packed import PackedLayout as PackedLayout
    from autopack.layout.row_parts import shard_rows as shard_rows
    from autopack.packing.balance import CostModel as CostModel
    from autopack.packing.dataset import pack as pack
    from autopack.packing.loss import weighted_loss as weighted_loss
    from autopack.packing.pairs import pair_lengths as pair_lengths
    from autopack.packing.pairs import pair_prefixes as pair_prefixes
    from autopack.packing.plans import Plan as Plan
    from autopack.packing.plans import plan as plan
    from autopack.packing.sampler import PackedBatchSampler as PackedBatchSampler
    from autopack.packing.shards import pack_shards as pack_shards
    from autopack.packing.shards import shard_files as shard_files
