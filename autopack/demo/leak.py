"""How much documents that share a row change one another, by the plain call that a user of transformers would write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopack.demo.batches import Example

TOLERANCE = 1e-4
"""In standard deviations of the logits; about 5e-6 is seen, and a leaking row shows 1."""


@dataclass(frozen=True)
class Leak:
    """What sharing a row does to the logits of a document, in standard deviations of the logits.

    `influence[i][j]` is the largest change in document i when document j is replaced, and `against_alone` the largest
    difference between a document in the row and the same document alone.
    """

    influence: list[list[float]]
    against_alone: float

    @property
    def influence_of_others(self) -> float:
        """The largest influence that any document has on another one."""
        return max(value for i, row in enumerate(self.influence) for j, value in enumerate(row) if i != j)

    @property
    def exact(self) -> bool:
        """Whether no document changes another, within fp32 rounding."""
        return max(self.influence_of_others, self.against_alone) <= TOLERANCE


def logits_alone(model: Any, documents: Sequence[Example]) -> list[Any]:
    """Logits (tokens, vocabulary) of every document by itself, from a stock model: what it should get in any row."""
    return [_logits(model, [document["input_ids"]])[0] for document in documents]


def measure_leak(model: Any, documents: Sequence[Example], reference: Sequence[Any], vocabulary: int) -> Leak:
    """Run documents in one row, and in rows in which one of them is replaced, and compare the logits.

    The call is ``model(input_ids=..., position_ids=...)`` and nothing else. The model must be in evaluation mode;
    `reference` is what `logits_alone` returned for the same weights.
    """
    ids = [document["input_ids"] for document in documents]
    replaced = [[(token * 7 + 13) % vocabulary for token in document] for document in ids]
    row = _logits(model, ids)
    changed = [_logits(model, [*ids[:j], replaced[j], *ids[j + 1 :]]) for j in range(len(ids))]
    scale = float(sum(part.std() for part in reference)) / len(reference)

    def distances(one: Sequence[Any], other: Sequence[Any]) -> list[float]:
        return [float((a - b).abs().max()) / scale for a, b in zip(one, other, strict=True)]

    influence = zip(*(distances(row, other) for other in changed), strict=True)
    return Leak([list(of_one) for of_one in influence], max(distances(row, reference)))


def _logits(model: Any, documents: Sequence[Sequence[int]]) -> list[Any]:
    """The logits of each document in a row of all of them."""
    import torch

    input_ids = torch.tensor([[token for document in documents for token in document]])
    position_ids = torch.tensor([[position for document in documents for position in range(len(document))]])
    with torch.no_grad():
        logits = model(input_ids=input_ids, position_ids=position_ids).logits[0]
    return list(logits.split([len(document) for document in documents]))
