"""Batches of documents that share rows, for map-style data sets: seeded, per epoch and rank, resumable."""

from __future__ import annotations

__all__ = ["PackedBatchSampler"]


class PackedBatchSampler:
    pass
