"""Equal work for all ranks: costs of rows, steps of rows of similar cost, and a complete last
step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autopack.inspection.configs import text_config
from autopack.packing.lengths import sums
from autopack.packing.strategies import permutation


@dataclass(frozen=True)
class CostModel:
    """Cost of training on a document, `linear * length + quadratic * length ** 2`.

    A row costs the sum of its documents.

    The unit is the cost of one token outside attention. In a transformer of hidden size h a token
    takes about 24 h² operations per layer, and a pair of tokens 2 h in causal attention: the ratio
    is 1 / (12 h), and the default is for h = 4096. `CostModel(0, 1)` counts attention alone,
    `CostModel(1, 0)` tokens alone.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 4096)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < float("inf")
            ):
                raise ValueError(f"{name}={value!r}: wanted a finite number of at least 0")
        if not self.linear + self.quadratic:
            raise ValueError("linear=0 and quadratic=0: wanted a model in which something costs")

    def __call__(self, lengths: Any) -> np.ndarray:
        """Return the cost of each document, float64, of the shape of `lengths`."""
        lengths = np.asarray(lengths, np.float64)
        return lengths * (self.linear + self.quadratic * lengths)

    def of_rows(
        self,
        lengths: np.ndarray,
        bounds: np.ndarray,
        shared: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the cost of each row, (rows,) float64; row r holds documents `bounds[r]` to
        `bounds[r + 1]`, whose `shared` tokens are computed with another one.

        Sums are of ints, and so the same on every machine: the order of rows of almost equal cost
        depends on it.
        """
        computed, squares = lengths, lengths * lengths
        if shared is not None:
            computed, squares = lengths - shared, squares - shared * shared
        return self.linear * sums(computed, bounds) + self.quadratic * sums(squares, bounds)

    @classmethod
    def for_model(cls, model: Any) -> CostModel:
        """Return the cost model for the `hidden_size` of a model or config of transformers."""
        hidden = getattr(text_config(getattr(model, "config", model)), "hidden_size", None)
        if not isinstance(hidden, int) or hidden < 1:
            raise ValueError(
                f"wanted a model or config with a hidden_size, found {type(model).__name__}"
            )
        return cls(1.0, 1 / (12 * hidden))


def arrange(costs: np.ndarray, ranks: int, seed: int) -> np.ndarray:
    """Return an order of rows in which every `ranks` rows, one step, are of similar cost.

    Steps are in random order, the costliest row of each first. Rows that do not make a complete
    step are at the end.
    """
    rest, rows = np.split(np.argsort(-costs, kind="stable"), [len(costs) % ranks])
    steps = rows.reshape(-1, ranks)[permutation(len(rows) // ranks, seed)]
    return np.concatenate([steps.ravel(), rest])


def complete(bounds: np.ndarray, ranks: int) -> np.ndarray:
    """Return the bounds of the same documents in a number of rows that is a multiple of `ranks`.

    Rows are halved, which keeps the order: each time the row of most documents, later ones first,
    of the last step, or of as many last steps as it takes. With too few documents the rows stay
    unchanged.
    """
    rows = len(bounds) - 1
    missing = -rows % ranks
    if not missing or bounds[-1] < rows + missing:
        return bounds
    taken = ranks - missing
    while bounds[-1] - bounds[-1 - taken] < taken + missing:
        taken += ranks
    whole, last = np.split(bounds, [-1 - taken])
    for _ in range(missing):
        sizes = np.diff(last)
        row = len(sizes) - 1 - int(sizes[::-1].argmax())
        last = np.insert(last, row + 1, (last[row] + last[row + 1] + 1) // 2)
    return np.concatenate([whole, last])
