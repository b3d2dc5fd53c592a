"""Which part of a configuration text models read."""

from __future__ import annotations

from typing import Any


def text_config(config: Any, **which: bool) -> Any:
    """The part of a config that text models read: the whole, where it has no parts.

    `which` is `decoder` or `encoder`, for configs that have one for each.
    """
    if hasattr(config, "get_text_config"):
        return config.get_text_config(**which)
    part = getattr(config, "text_config", None)  # transformers 4.44
    return part if hasattr(part, "model_type") else config
