"""MobileBERT: its embeddings join each token with its left and right neighbour, across the ends of documents."""

from autopack.family import Family, Tiny
from autopack.mixers import Alone

FAMILY = Family(
    name="mobilebert",
    model_types=frozenset({"mobilebert"}),
    how="embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
    tiny=Tiny(configs={"mobilebert": {"embedding_size": 32}}),
)
