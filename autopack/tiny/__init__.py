"""Tiny random models of any model type of transformers, from configuration only.

    model = tiny.build("qwen3_next", attn_implementation="sdpa")
    ids = tiny.tokens(model.config, 1, 33)

They build in milliseconds and hold a layer of every kind that their type has. Windows, chunks and
key budgets are shorter than a short document, and parameters are large enough for leaked context to
show in the logits.
"""

from autopack.registry import first_position
from autopack.tiny.configs import TASKS, CannotBuild, config, types_for
from autopack.tiny.models import build, tokens

__all__ = ["TASKS", "CannotBuild", "build", "config", "first_position", "tokens", "types_for"]
