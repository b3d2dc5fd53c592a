"""Tiny models of transformers' own code, with random weights."""

from __future__ import annotations

from typing import Any

import autopack
from autopack import tiny


def stock(kind: str, task: str = "causal-lm") -> Any:
    """Return a model as transformers makes it."""
    return tiny.build(kind, task=task, attn_implementation="eager")


def enabled(kind: str, task: str = "causal-lm") -> Any:
    """Return the same, enabled."""
    model = stock(kind, task)
    autopack.enable(model)
    return model
