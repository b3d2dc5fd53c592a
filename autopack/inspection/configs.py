"""The part of a configuration that text models read."""

from __future__ import annotations

from typing import Any


def text_config(config: Any, **which: bool) -> Any:
    """Return the part of a config that text models read; the whole config if it has no parts.

    `which` is `decoder` or `encoder`, for configs that have one for each.
    """
    if hasattr(config, "get_text_config"):
        # of the two, `decoder` alone up to 4.53
        taken = type(config).get_text_config.__code__.co_varnames
        return config.get_text_config(**{name: which[name] for name in which if name in taken})
    part = getattr(config, "text_config", None)  # transformers 4.44
    return part if hasattr(part, "model_type") else config
