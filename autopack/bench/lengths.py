"""Lengths of documents like those of data sets that are known: lognormal, by mean and sigma."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SHORTEST = 4


class Lengths(NamedTuple):
    """Lognormal lengths in tokens: their mean before any is cut, and the sigma of their logarithm."""

    mean: float
    sigma: float


DISTRIBUTIONS = {"flan": Lengths(471, 1.0), "orcamath": Lengths(500, 0.4)}
"""FLAN_20k has 9.4 million tokens in 19,961 rows (arXiv 2407.09105, Table 2: 2,294 rows of 4096) and a large variance.
OrcaMath is somewhat longer and varies much less, says huggingface.co/blog/packing-with-FA2, without figures: mean and
sigma are assumed, so that mini-batches of 4 have 1.45 padded tokens per real one, about what a gain of 1.4 needs."""


def draw(lengths: Lengths, count: int, longest: int, seed: int, scale: int = 1) -> np.ndarray:
    """So many lengths divided by `scale`, between `SHORTEST` and `longest`, (count,) int64."""
    mean, sigma = lengths
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.round(drawn / scale), min(SHORTEST, longest), longest).astype(np.int64)
