"""Tiny models that take images."""

from __future__ import annotations

from typing import Any

from autopack import tiny


def with_images(model_type: str, attn_implementation: str = "sdpa", **others: Any) -> Any:
    return tiny.build(model_type, task="image-text-to-text", attn_implementation=attn_implementation, **others)


def twins_with_images(model_type: str, **others: Any) -> tuple[Any, Any]:
    """A stock model and one to enable, with the same parameters."""
    return with_images(model_type, **others), with_images(model_type, **others)
