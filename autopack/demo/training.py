"""One small Llama trained twice on the same mini-batches: padded by stock transformers, and packed by autopack.

And how much documents that share a row change one another, by the plain call that a user of transformers would write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from autopack.demo.arms import Comparison, LanguageArm, Progress, Tell, measured, packed, padded, train
from autopack.demo.batches import (
    END_OF_TEXT_ID,
    Example,
    draw_batches,
    lengths_of,
    token_counts,
    tokenize,
    train_tokenizer,
)
from autopack.demo.corpus import collect_documents

DOCUMENTS_IN_LEAK_TEST = 6
LEAK_TOLERANCE = 1e-4
"""In standard deviations of the logits; about 5e-6 is seen, and a leaking row shows 1."""


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long. The defaults take about 75 seconds on two CPU cores."""

    steps: int = 40
    seed: int = 0
    batch_size: int = 16
    longest: int = 512
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    learning_rate: float = 1e-3


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
        """Whether no document changes another, within float32 rounding."""
        return max(self.influence_of_others, self.against_alone) <= LEAK_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class LlamaComparison(Comparison):
    """What the demo of a small Llama shows."""

    reference: ClassVar[str] = "padded"

    texts: int
    lengths: list[int]
    stock_leak: Leak
    leak: Leak

    @property
    def succeeded(self) -> bool:
        """Whether packed training equals padded training and documents in a row do not change each other."""
        return self.losses_equal and self.leak.exact


def compare(settings: Settings, tell: Tell = lambda stage: None, progress: Progress = iter) -> LlamaComparison:
    """Collect the text, train both arms step by step in turn, and measure the leak of the trained model.

    Raises `CorpusTooSmall` where the Python installation holds too little text.
    """
    tell("collecting the documentation of this Python installation")
    texts = collect_documents()
    tell(f"training a tokenizer on {len(texts):,} documents")
    examples = tokenize(texts, train_tokenizer(texts, settings.vocabulary), settings.longest)
    batches = draw_batches(examples, settings.batch_size, settings.steps, settings.seed)

    tell("importing torch and transformers")
    import autopack

    arms = {"padded": _arm(settings, padded), "packed": _arm(settings, packed)}
    model = arms["packed"].model
    handle = autopack.enable(model)
    largest = max(batches, key=lambda batch: token_counts(lengths_of([batch]))[1])
    for arm in arms.values():
        arm.warm_up(largest)
    train(arms, batches, tell, progress)

    tell("measuring what documents in one row do to each other")
    model.eval()
    short = [example for example in examples if 16 <= len(example["input_ids"]) <= 64]
    (documents,) = draw_batches(short, DOCUMENTS_IN_LEAK_TEST, 1, settings.seed)
    handle.remove()
    reference = logits_alone(model, documents)
    stock_leak = measure_leak(model, documents, reference, settings.vocabulary)
    autopack.enable(model)
    leak = measure_leak(model, documents, reference, settings.vocabulary)

    return LlamaComparison(
        settings=settings,
        texts=len(texts),
        lengths=sorted(len(example["input_ids"]) for example in examples),
        stock_leak=stock_leak,
        leak=leak,
        **measured(arms, lengths_of(batches)),
    )


def _arm(settings: Settings, lay_out: Callable[..., list[dict[str, Any]]]) -> LanguageArm:
    """An arm with a Llama of its own; its rate rises for five steps, then falls to a tenth."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, heads = settings.hidden, max(1, settings.hidden // 64)
    form: dict[str, Any] = {"vocab_size": settings.vocabulary, "max_position_embeddings": settings.longest}
    form |= {"hidden_size": hidden, "intermediate_size": hidden * 5 // 2, "num_hidden_layers": settings.layers}
    form |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "tie_word_embeddings": True}
    form |= {"bos_token_id": None, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": None}
    torch.manual_seed(settings.seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**form), attn_implementation="sdpa")
    # The second beta and the clipped norm are those of most language models. They also keep the training calm:
    # where it is not, Adam blows rounding up a thousandfold, whichever way the batches are made.
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 5, 1 - 0.9 * n / settings.steps))
    optimizer.register_step_post_hook(lambda *_: rates.step())
    return LanguageArm(model, lay_out, optimizer)


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
