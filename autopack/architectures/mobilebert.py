"""MobileBERT: its embeddings join each token with its left and right neighbour, across the ends of documents."""

from autopack.family import Family
from autopack.mixers import Alone

__all__ = ["FAMILY"]

FAMILY = Family(
    name="mobilebert",
    model_types=frozenset({"mobilebert"}),
    path="embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
)
