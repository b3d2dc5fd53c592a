"""Sentences of random words, and tiny models with a tokenizer that knows the words."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from autopack import tiny

WORDS = [f"word{number}" for number in range(100)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def folder(path, model_type, task, backbone=False, **overrides):
    """A tiny model, or its backbone, and a tokenizer of words, as a folder that sentence-transformers loads."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    PreTrainedTokenizerFast(tokenizer_object=words, **names, model_max_length=48).save_pretrained(path)
    model = tiny.build(model_type, task=task, pad_token_id=0, **overrides)
    (model.base_model if backbone else model).save_pretrained(path)
    return str(path)


def sentences(count, seed=0):
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 20))) for _ in range(count)]
