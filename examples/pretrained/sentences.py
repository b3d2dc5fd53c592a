"""all-MiniLM-L6-v2 three times: padded by stock, enabled, and each sentence alone; encoding,
training, retrieval."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopack.demo import collect_documents

from .arms import Arm, Comparison, Progress, Tell, measured, train
from .texts import Pair, collect_pairs, draw_apart, in_batches
from .weights import MINILM, checked_folder

WAYS = ("padded", "enabled", "alone")
"""The arms: stock on padded batches, an enabled model on the same batches, and stock on one
sentence at a time."""
EMBEDDING_TOLERANCE = 1e-6
"""Of vectors of length one; about 2e-7 is seen."""
TIE = 1e-5
"""Passages whose scores are nearer than this are equally near to a query: rounding must not rank
them."""
SCALE = 20.0
"""What similarities are multiplied by in the loss, as in sentence-transformers'
MultipleNegativesRankingLoss."""


@dataclass(frozen=True)
class SentenceSettings:
    """What is encoded and trained. The defaults take about a minute on two CPU cores."""

    steps: int = 6
    seed: int = 0
    batch_size: int = 12
    held_out: int = 96
    longest: int = 96
    learning_rate: float = 2e-5


class Retrieval(NamedTuple):
    """How well queries find their passages: the share whose own is the nearest, and the mean of 1 /
    rank."""

    accuracy_at_1: float
    mrr: float


class SentenceArm(Arm):
    """One of the ways: its encoder, and what was measured of it."""

    def __init__(self, way: str, settings: SentenceSettings) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        encoder: Any = SentenceTransformer(
            str(checked_folder(MINILM)), device="cpu", local_files_only=True
        )
        encoder.max_seq_length = settings.longest
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # what it draws depends on the form of the batch, in stock too
        super().__init__(
            encoder,
            torch.optim.AdamW(encoder.parameters(), lr=settings.learning_rate),
            clip=math.inf,
        )
        self.alone = way == "alone"
        self.encoding_seconds = 0.0

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeddings (texts, 384) of length one: of one padded batch, or of each text by itself."""
        import torch

        # Renamed in sentence-transformers 5.2.
        read = self.model.preprocess if hasattr(self.model, "preprocess") else self.model.tokenize
        groups = in_batches(list(texts), 1 if self.alone else len(texts))
        return torch.cat([self.model(dict(read(group)))["sentence_embedding"] for group in groups])

    def encode(self, texts: Sequence[str]) -> Any:
        """Embeddings of the texts of a batch, without gradients; the time is recorded."""
        import torch

        self.model.eval()
        started = time.perf_counter()
        with torch.no_grad():
            found = self.embed(texts)
        self.encoding_seconds += time.perf_counter() - started
        return found

    def parts(self, batch: Sequence[Pair]) -> Iterator[Any]:
        """The loss of pairs, of which each has the passages of the others as wrong ones."""
        import torch

        queries, passages = (self.embed(texts) for texts in zip(*batch, strict=True))
        yield torch.nn.functional.cross_entropy(
            SCALE * queries @ passages.T, torch.arange(len(batch))
        )


@dataclass(frozen=True, kw_only=True)
class SentenceComparison(Comparison):
    """What the demo of sentences shows; tokens are those that are encoded.

    `differences` are the largest ones between embeddings of the same weights, by the names of the
    two ways."""

    pairs: int
    differences: dict[tuple[str, str], float]
    before: dict[str, Retrieval]
    after: dict[str, Retrieval]

    @property
    def embeddings_equal(self) -> bool:
        """Whether all ways give the same embeddings, within float32 rounding."""
        return all(value <= EMBEDDING_TOLERANCE for value in self.differences.values())

    @property
    def retrieval_equal(self) -> bool:
        """Whether all ways find the same, before and after the training."""
        return len(set(self.before.values())) == len(set(self.after.values())) == 1

    @property
    def succeeded(self) -> bool:
        """Whether nothing but the time differs."""
        return self.embeddings_equal and self.losses_equal and self.retrieval_equal


def retrieval(embeddings: Any) -> Retrieval:
    """What queries find, of embeddings (2 x pairs, width) in which each query is followed by its
    passage."""
    queries, passages = embeddings[0::2], embeddings[1::2]
    scores = queries @ passages.T
    # What is not a number is nearer than anything, so that it is seen.
    ranks = (~(scores <= scores.diagonal()[:, None] + TIE)).sum(1) + 1
    return Retrieval(float((ranks == 1).double().mean()), float((1 / ranks.double()).mean()))


def compare_sentences(
    settings: SentenceSettings, tell: Tell = lambda stage: None, progress: Progress = iter
) -> SentenceComparison:
    """Encode held-out pairs in all ways, train on others step by step in turn, and encode the
    held-out ones again.

    Raises `WeightsMissing` or `WeightsChanged` before anything is loaded, and `CorpusTooSmall`
    where the Python installation holds too little text."""
    tell(f"checking the weights of {MINILM.model}")
    checked_folder(MINILM)
    tell("collecting the documentation of this Python installation")
    pairs, size = collect_pairs(collect_documents()), settings.batch_size
    held_out, trained_on = draw_apart(
        pairs, settings.held_out, settings.steps * size, settings.seed
    )
    texts = [text for pair in held_out for text in pair]

    tell("importing torch and sentence-transformers")
    import autopack

    arms = {way: SentenceArm(way, settings) for way in WAYS}
    autopack.enable(arms["enabled"].model)
    for arm in arms.values():
        arm.warm_up(trained_on[:size])
    tell(f"encoding {len(texts)} sentences and passages in {len(arms)} ways")
    chunks = in_batches(texts, size)
    embeddings = _encode(arms, chunks)
    train(arms, in_batches(trained_on, size), tell, progress)
    tell("encoding them again")
    trained = _encode(arms, chunks)

    tokenizer = arms["padded"].model.tokenizer
    ids = [
        tokenizer(chunk, truncation=True, max_length=settings.longest)["input_ids"]
        for chunk in chunks
    ]
    found = measured(arms, [[len(each) for each in chunk] for chunk in ids])
    found["seconds"] = {
        "encoding": {way: arm.encoding_seconds for way, arm in arms.items()},
        **found["seconds"],
    }
    return SentenceComparison(
        settings=settings,
        pairs=len(pairs),
        differences={
            (way, other): float((embeddings[way] - embeddings[other]).abs().max())
            for way, other in (("padded", "alone"), ("enabled", "alone"), ("enabled", "padded"))
        },
        before={way: retrieval(of_way) for way, of_way in embeddings.items()},
        after={way: retrieval(of_way) for way, of_way in trained.items()},
        **found,
    )


def _encode(arms: dict[str, SentenceArm], chunks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The embeddings of all texts by way, batches in the order in which they come, every way in
    turn."""
    import torch

    found = [{way: arm.encode(chunk) for way, arm in arms.items()} for chunk in chunks]
    return {way: torch.cat([each[way] for each in found]) for way in arms}
