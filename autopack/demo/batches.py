"""From texts to mini-batches: a tokenizer trained on the spot, a seeded order, and padded batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from autopack.layout import IGNORED_LABEL

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

Example = dict[str, list[int]]


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer` on texts; any text can be encoded and decoded without loss."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(texts: Sequence[str], tokenizer: Any, longest: int) -> list[Example]:
    """Encode every text as one example that ends with the end-of-text token, cut after ``longest`` tokens."""
    encodings = tokenizer.encode_batch(list(texts))
    return [{"input_ids": [*encoding.ids, END_OF_TEXT_ID][:longest]} for encoding in encodings]


def draw_batches(examples: Sequence[Example], size: int, steps: int, seed: int) -> list[list[Example]]:
    """Draw ``steps`` mini-batches of ``size`` examples in a seeded order, shuffled anew in every epoch."""
    generator = random.Random(seed)
    endless = chain.from_iterable(iter(lambda: generator.sample(examples, len(examples)), None))
    return [list(islice(endless, size)) for _ in range(steps)]


def pad(examples: Sequence[Example]) -> dict[str, Any]:
    """Stack examples in the ordinary way: one per row, padded on the right to the longest.

    Returns ``input_ids``, ``attention_mask`` and ``labels`` (-100 at padding), all (rows, longest) int64.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(example["input_ids"]) for example in examples]
    labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED_LABEL)
    real = labels != IGNORED_LABEL
    return {"input_ids": labels.where(real, END_OF_TEXT_ID), "attention_mask": real.long(), "labels": labels}


def lengths_of(batches: Sequence[Sequence[Example]]) -> list[list[int]]:
    """The tokens of every example, by mini-batch."""
    return [[len(example["input_ids"]) for example in batch] for batch in batches]


def token_counts(lengths: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Count the real tokens of mini-batches of these lengths, and their tokens when they are padded."""
    return sum(map(sum, lengths)), sum(len(batch) * max(batch) for batch in lengths)
