"""Texts of the Python installation as questions and passages, drawn apart, in batches, and one at a
time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from autopack.demo import SHORTEST, CorpusTooSmall, Example

from .arms import LanguageArm, padded

SHORTEST_QUERY, LONGEST_QUERY = 20, 200
Text = TypeVar("Text")
Item = TypeVar("Item")


class Pair(NamedTuple):
    """A question and the passage that belongs to it."""

    query: str
    passage: str


def collect_pairs(texts: Sequence[str]) -> list[Pair]:
    """The pairs of texts with more than one paragraph, in their order; no query and no passage
    occurs twice."""
    found: dict[str, Pair] = {}
    passages: set[str] = set()
    for text in texts:
        first, _, rest = text.partition("\n\n")
        pair = Pair(" ".join(first.split()), " ".join(rest.split()))
        wanted = (
            SHORTEST_QUERY <= len(pair.query) <= LONGEST_QUERY and len(pair.passage) >= SHORTEST
        )
        if wanted and pair.query not in found and pair.passage not in passages:
            found[pair.query] = pair
            passages.add(pair.passage)
    return list(found.values())


def draw_apart(
    texts: Sequence[Text], held_out: int, trained_on: int, seed: int
) -> tuple[list[Text], list[Text]]:
    """Draw texts to hold out and other ones to train on, by a seed.

    Raises `CorpusTooSmall` where there are fewer than both together.
    """
    if len(texts) < held_out + trained_on:
        raise CorpusTooSmall(
            f"the demo wants {held_out + trained_on} texts of the documentation inside the Python "
            f"installation, but found {len(texts)}: this Python seems to be shipped without its "
            "source files, or --steps asks for more than it has. Run the demo with a Python from "
            "python.org, conda, uv or a distribution's full package, or with fewer steps."
        )
    drawn = random.Random(seed).sample(texts, held_out + trained_on)
    return drawn[:held_out], drawn[held_out:]


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Items in their order, so many at a time; the last batch may be smaller."""
    return [items[first : first + size] for first in range(0, len(items), size)]


def alone(batch: Sequence[Example]) -> list[dict[str, Any]]:
    """A batch as one call per document."""
    return [call for example in batch for call in padded([example])]


def evaluate(arm: LanguageArm, batch: Sequence[Example]) -> float:
    """Return the loss of a batch, the mean over all tokens that are predicted."""
    import torch

    arm.model.eval()
    with torch.no_grad():
        return sum(part.item() for part in arm.parts(batch))
