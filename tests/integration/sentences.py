"""Sentences of random words, and tiny models with a tokenizer that knows the words."""

import random

from autopack import tiny
from compat.programs._words import WORDS, tokenizer_of

WORDS = WORDS[:40]


def folder(path, model_type, task, backbone=False, **overrides):
    """A tiny model, or its backbone, and a tokenizer of words, as a folder that
    sentence-transformers loads."""
    model = tiny.build(model_type, task=task, pad_token_id=0, **overrides)
    (model.base_model if backbone else model).save_pretrained(path)
    tokenizer_of(WORDS, 48).save_pretrained(path)
    return str(path)


def words(draw, known, least, most):
    return " ".join(draw.choices(known, k=draw.randint(least, most)))


def sentences(count, seed=0):
    chosen = random.Random(seed)
    return [words(chosen, WORDS, 1, 20) for _ in range(count)]
