"""all-MiniLM-L6-v2 three times: padded by stock, enabled, and each sentence alone; encoding, training, retrieval."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopack.demo.corpus import collect_documents
from autopack.demo.pretrained.differences import relative_difference
from autopack.demo.pretrained.pairs import Pair, collect_pairs, draw_apart
from autopack.demo.pretrained.weights import MINILM, checked_folder

WAYS = ("padded", "enabled", "alone")
"""The arms: stock on padded batches, an enabled model on the same batches, and stock on one sentence at a time."""
EMBEDDING_TOLERANCE = 1e-6
"""Of vectors of length one; about 2e-7 is seen."""
LOSS_TOLERANCE = 1e-5
"""Relative, over all steps; about 1e-6 is seen in the last one."""
TIE = 1e-5
"""Passages whose scores are nearer than this are equally near to a query: rounding must not rank them."""
SCALE = 20.0
"""What similarities are multiplied by in the loss, as in sentence-transformers' MultipleNegativesRankingLoss."""


@dataclass(frozen=True)
class SentenceSettings:
    """What is encoded and trained. The defaults take about a minute on two CPU cores."""

    steps: int = 6
    seed: int = 0
    batch_size: int = 12
    held_out: int = 96
    longest: int = 96
    learning_rate: float = 2e-5


@dataclass(frozen=True)
class Retrieval:
    """How well queries find their passages: the share whose own is the nearest, and the mean of 1 / rank."""

    accuracy_at_1: float
    mrr: float


class Arm:
    """One of the ways: its model, and what was measured of it."""

    def __init__(self, way: str, settings: SentenceSettings) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        folder = str(checked_folder(MINILM))
        self.encoder: Any = SentenceTransformer(folder, device="cpu", local_files_only=True)
        self.encoder.max_seq_length = settings.longest
        for module in self.encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # what it draws depends on the form of the batch, in stock too
        self.way, self.settings = way, settings
        self.optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=settings.learning_rate)
        self.losses: list[float] = []
        self.encoding_seconds = self.training_seconds = 0.0

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeddings (texts, 384) of length one: of one padded batch, or of each text by itself."""
        import torch

        groups = [[text] for text in texts] if self.way == "alone" else [list(texts)]
        return torch.cat([self.encoder(self._features(group))["sentence_embedding"] for group in groups])

    def encode(self, texts: Sequence[str]) -> Any:
        """Embeddings of the texts of a batch, without gradients; the time is recorded."""
        import torch

        self.encoder.eval()
        started = time.perf_counter()
        with torch.no_grad():
            found = self.embed(texts)
        self.encoding_seconds += time.perf_counter() - started
        return found

    def loss(self, pairs: Sequence[Pair]) -> Any:
        """The loss of pairs, of which each has the passages of the others as wrong ones."""
        import torch

        queries, passages = (self.embed(texts) for texts in zip(*((p.query, p.passage) for p in pairs), strict=True))
        scores = SCALE * queries @ passages.T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(pairs)))

    def warm_up(self, pairs: Sequence[Pair]) -> None:
        """Run pairs forwards and backwards without learning from them, so that first-call costs are not timed."""
        self.encoder.train()
        self.loss(pairs).backward()
        self.optimizer.zero_grad()

    def step(self, pairs: Sequence[Pair]) -> None:
        """Take an optimizer step and record loss and time."""
        self.encoder.train()
        started = time.perf_counter()
        loss = self.loss(pairs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.training_seconds += time.perf_counter() - started

    def _features(self, texts: list[str]) -> dict[str, Any]:
        # Renamed in sentence-transformers 5.2.
        read = self.encoder.preprocess if hasattr(self.encoder, "preprocess") else self.encoder.tokenize
        return dict(read(texts))


@dataclass(frozen=True)
class SentenceComparison:
    """What the demo of sentences shows, by way where there are several.

    `differences` are the largest ones between embeddings of the same weights, by the names of the two ways.
    """

    settings: SentenceSettings
    pairs: int
    parameters: int
    threads: int
    real_tokens: int
    padded_tokens: int
    differences: dict[tuple[str, str], float]
    before: dict[str, Retrieval]
    losses: dict[str, list[float]]
    after: dict[str, Retrieval]
    encoding_seconds: dict[str, float]
    training_seconds: dict[str, float]

    def loss_difference(self, way: str, other: str) -> float:
        """The largest relative difference of two ways' losses in any step."""
        return relative_difference(self.losses[way], self.losses[other])

    @property
    def embeddings_equal(self) -> bool:
        """Whether all ways give the same embeddings, within float32 rounding."""
        return all(value <= EMBEDDING_TOLERANCE for value in self.differences.values())

    @property
    def losses_equal(self) -> bool:
        """Whether all ways have the same losses in all steps, within float32 rounding."""
        return all(self.loss_difference(way, "alone") <= LOSS_TOLERANCE for way in WAYS)

    @property
    def retrieval_equal(self) -> bool:
        """Whether all ways find the same, before and after the training."""
        return len(set(self.before.values())) == len(set(self.after.values())) == 1

    @property
    def succeeded(self) -> bool:
        """Whether nothing but the time differs."""
        return self.embeddings_equal and self.losses_equal and self.retrieval_equal


def retrieval(embeddings: Any) -> Retrieval:
    """What queries find, of embeddings (2 x pairs, width) in which each query is followed by its passage."""
    queries, passages = embeddings[0::2], embeddings[1::2]
    scores = queries @ passages.T
    # What is not a number is nearer than anything, so that it is seen.
    ranks = (~(scores <= scores.diagonal()[:, None] + TIE)).sum(1) + 1
    return Retrieval(float((ranks == 1).double().mean()), float((1 / ranks.double()).mean()))


def compare_sentences(
    settings: SentenceSettings,
    tell: Callable[[str], None] = lambda stage: None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> SentenceComparison:
    """Encode held-out pairs in all ways, train on others step by step in turn, and encode the held-out ones again.

    `tell` is called with a short line at the beginning of every stage, and `progress` wraps the batches that are
    iterated over. Raises `WeightsMissing` or `WeightsChanged` before anything is loaded, and `CorpusTooSmall` where the
    Python installation holds too little text.
    """
    tell(f"checking the weights of {MINILM.model}")
    checked_folder(MINILM)
    tell("collecting the documentation of this Python installation")
    pairs = collect_pairs(collect_documents())
    size = settings.batch_size
    held_out, trained_on = draw_apart(pairs, settings.held_out, settings.steps * size, settings.seed)
    batches = [trained_on[first : first + size] for first in range(0, len(trained_on), size)]
    texts = [text for pair in held_out for text in (pair.query, pair.passage)]

    tell("importing torch and sentence-transformers")
    import torch

    import autopack

    arms = {way: Arm(way, settings) for way in WAYS}
    autopack.enable(arms["enabled"].encoder)
    for arm in arms.values():
        arm.warm_up(trained_on[:size])

    tell(f"encoding {len(texts)} sentences and passages in {len(arms)} ways")
    chunks = [texts[first : first + size] for first in range(0, len(texts), size)]
    embeddings = _encode(arms, chunks)
    tell(f"training in {len(arms)} ways, {settings.steps} steps each")
    for batch in progress(batches):
        for arm in arms.values():
            arm.step(batch)
    tell("encoding them again")
    trained = _encode(arms, chunks)

    lengths = [_lengths(arms["padded"].encoder, chunk) for chunk in chunks]
    return SentenceComparison(
        settings=settings,
        pairs=len(pairs),
        parameters=sum(parameter.numel() for parameter in arms["padded"].encoder.parameters()),
        threads=torch.get_num_threads(),
        real_tokens=sum(map(sum, lengths)),
        padded_tokens=sum(len(chunk) * max(chunk) for chunk in lengths),
        differences={
            (way, other): float((embeddings[way] - embeddings[other]).abs().max())
            for way, other in (("padded", "alone"), ("enabled", "alone"), ("enabled", "padded"))
        },
        before={way: retrieval(found) for way, found in embeddings.items()},
        losses={way: arm.losses for way, arm in arms.items()},
        after={way: retrieval(found) for way, found in trained.items()},
        encoding_seconds={way: arm.encoding_seconds for way, arm in arms.items()},
        training_seconds={way: arm.training_seconds for way, arm in arms.items()},
    )


def _encode(arms: dict[str, Arm], chunks: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The embeddings of all texts by way, batches in the order in which they come, every way in turn."""
    import torch

    found: dict[str, list[Any]] = {way: [] for way in arms}
    for chunk in chunks:
        for way, arm in arms.items():
            found[way].append(arm.encode(chunk))
    return {way: torch.cat(parts) for way, parts in found.items()}


def _lengths(encoder: Any, texts: Sequence[str]) -> list[int]:
    """The tokens of each text, as the encoder cuts it."""
    ids = encoder.tokenizer(list(texts), truncation=True, max_length=encoder.max_seq_length)["input_ids"]
    return [len(each) for each in ids]
