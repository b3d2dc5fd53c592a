"""Packing: which examples share a row, and the packed rows themselves. Imports neither torch nor transformers."""

from __future__ import annotations

from autopack.packing.collator import PackingCollator as PackingCollator
