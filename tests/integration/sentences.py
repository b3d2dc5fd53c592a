"""Sentences of random words, and tiny models with a tokenizer that knows the words."""

import random
import shutil

from autopack import tiny
from compat.neighbours.others import _WORDS as WORDS
from compat.neighbours.others import _folder as saved


def folder(path, model_type, task, backbone=False, **overrides):
    """A tiny model, or its backbone, and a tokenizer of words, as a folder that
    sentence-transformers loads."""
    model = tiny.build(model_type, task=task, pad_token_id=0, **overrides)
    with saved(model.base_model if backbone else model) as made:
        return shutil.copytree(made, str(path), dirs_exist_ok=True)


def words(draw, known, least, most):
    return " ".join(draw.choices(known, k=draw.randint(least, most)))


def sentences(count, seed=0):
    chosen = random.Random(seed)
    return [words(chosen, WORDS, 1, 20) for _ in range(count)]
