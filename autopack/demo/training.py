"""One small Llama trained twice on the same mini-batches: padded by stock transformers, and packed by autopack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low
from typing import Any, ClassVar

from autopack.demo.arms import Comparison, LanguageArm, Progress, Tell, measured, packed, padded, train
from autopack.demo.batches import END_OF_TEXT_ID, draw_batches, lengths_of, tokenize, train_tokenizer
from autopack.demo.corpus import collect_documents
from autopack.demo.leak import Leak, logits_alone, measure_leak

DOCUMENTS_IN_LEAK_TEST = 6


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


@dataclass(frozen=True, kw_only=True)
class LlamaComparison(Comparison):
    """What the demo of a small Llama shows; `shown_batch` are the lengths in a mini-batch of typical padding."""

    reference: ClassVar[str] = "padded"

    texts: int
    lengths: list[int]
    stock_leak: Leak
    leak: Leak
    shown_batch: list[int]

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
    lengths = lengths_of(batches)
    largest = max(range(len(batches)), key=lambda number: len(lengths[number]) * max(lengths[number]))
    for arm in arms.values():
        arm.warm_up(batches[largest])
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

    fill = [sum(batch) / (len(batch) * max(batch)) for batch in lengths]
    return LlamaComparison(
        settings=settings,
        texts=len(texts),
        lengths=sorted(len(example["input_ids"]) for example in examples),
        stock_leak=stock_leak,
        leak=leak,
        shown_batch=lengths[fill.index(median_low(fill))],
        **measured(arms, lengths),
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
