"""One small Llama trained twice on the same mini-batches: padded by stock transformers, and packed by autopack."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from autopack.demo.batches import END_OF_TEXT_ID, Example, draw_batches, pad, token_counts, tokenize, train_tokenizer
from autopack.demo.corpus import collect_documents
from autopack.demo.leak import Leak, logits_alone, measure_leak

LOSS_TOLERANCE = 1e-5
"""Relative; about 2e-7 is seen, and a packed row that leaks differs by 4e-3 in the first step."""

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


class Arm:
    """One of the two trainings: its model, and what was measured in every step."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        hidden, heads = settings.hidden, max(1, settings.hidden // 64)
        form: dict[str, Any] = {"vocab_size": settings.vocabulary, "max_position_embeddings": settings.longest}
        form |= {"hidden_size": hidden, "intermediate_size": hidden * 5 // 2, "num_hidden_layers": settings.layers}
        form |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "tie_word_embeddings": True}
        form |= {"bos_token_id": None, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": None}
        config = LlamaConfig(**form)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        # The second beta and the clipped norm are those of most language models. They also keep the training calm:
        # where it is not, Adam blows rounding up a thousandfold, whichever way the batches are made.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        self.losses: list[float] = []
        self.seconds = 0.0

    def warm_up(self, batch: dict[str, Any]) -> None:
        """Run a batch forwards and backwards without learning from it, so that first-call costs are not timed."""
        self.model(**batch).loss.backward()
        self.optimizer.zero_grad()

    def step(self, batch: dict[str, Any]) -> None:
        """Take an optimizer step and record loss and time; the rate rises for five steps, then falls to a tenth."""
        import torch

        started, number = time.perf_counter(), len(self.losses)
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        share = min((number + 1) / 5, 1 - 0.9 * number / self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Comparison:
    """What the demo shows; `shown_batch` are the lengths in a mini-batch with a typical share of padding."""

    settings: Settings
    texts: int
    lengths: list[int]
    parameters: int
    threads: int
    real_tokens: int
    padded_tokens: int
    padded_losses: list[float]
    packed_losses: list[float]
    padded_seconds: float
    packed_seconds: float
    stock_leak: Leak
    leak: Leak
    shown_batch: list[int]

    @property
    def speedup(self) -> float:
        """Real tokens per second of packed rows over those of padded batches."""
        return self.padded_seconds / self.packed_seconds

    @property
    def loss_differences(self) -> list[float]:
        """The relative difference of the two losses in every step."""
        pairs = zip(self.padded_losses, self.packed_losses, strict=True)
        return [abs(packed - padded) / abs(padded) for padded, packed in pairs]

    @property
    def losses_equal(self) -> bool:
        """Whether the losses of all steps agree within fp32 rounding."""
        return all(difference <= LOSS_TOLERANCE for difference in self.loss_differences)

    @property
    def succeeded(self) -> bool:
        """Whether packed training equals padded training and documents in a row do not change each other."""
        return self.losses_equal and self.leak.exact


def compare(
    settings: Settings,
    tell: Callable[[str], None] = lambda stage: None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Comparison:
    """Collect the text, train both arms step by step in turn, and measure the leak of the trained model.

    `tell` is called with a short line at the beginning of every stage, and `progress` wraps the mini-batches that are
    iterated over. Raises `CorpusTooSmall` where the Python installation holds too little text.
    """
    tell("collecting the documentation of this Python installation")
    texts = collect_documents()
    tell(f"training a tokenizer on {len(texts):,} documents")
    examples = tokenize(texts, train_tokenizer(texts, settings.vocabulary), settings.longest)
    batches = draw_batches(examples, settings.batch_size, settings.steps, settings.seed)

    tell("importing torch and transformers")
    import torch

    import autopack

    collate = autopack.PackingCollator()
    padded, packed = Arm(settings), Arm(settings)
    handle = autopack.enable(packed.model)
    # Cache off, as transformers' Trainer has it: a cache would only make the padded arm slower.
    inputs = [({**pad(batch), "use_cache": False}, collate(batch)) for batch in batches]
    largest = max(inputs, key=lambda pair: pair[0]["input_ids"].numel())
    padded.warm_up(largest[0])
    packed.warm_up(largest[1])

    tell(f"training twice, {settings.steps} steps each")
    for padded_batch, packed_batch in progress(inputs):
        padded.step(padded_batch)
        packed.step(packed_batch)

    tell("measuring what documents in one row do to each other")
    model = packed.model.eval()
    short = [example for example in examples if 16 <= len(example["input_ids"]) <= 64]
    (documents,) = draw_batches(short, DOCUMENTS_IN_LEAK_TEST, 1, settings.seed)
    handle.remove()
    reference = logits_alone(model, documents)
    stock_leak = measure_leak(model, documents, reference, settings.vocabulary)
    autopack.enable(model)
    leak = measure_leak(model, documents, reference, settings.vocabulary)

    real_tokens, padded_tokens = token_counts(batches)
    return Comparison(
        settings=settings,
        texts=len(texts),
        lengths=sorted(len(example["input_ids"]) for example in examples),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        threads=torch.get_num_threads(),
        real_tokens=real_tokens,
        padded_tokens=padded_tokens,
        padded_losses=padded.losses,
        packed_losses=packed.losses,
        padded_seconds=padded.seconds,
        packed_seconds=packed.seconds,
        stock_leak=stock_leak,
        leak=leak,
        shown_batch=_typical_batch(batches),
    )


def _typical_batch(batches: Sequence[Sequence[Example]]) -> list[int]:
    """The lengths in the mini-batch whose share of padding is the median one."""
    lengths = [[len(example["input_ids"]) for example in batch] for batch in batches]
    fill = [sum(batch) / (len(batch) * max(batch)) for batch in lengths]
    return lengths[fill.index(median_low(fill))]
