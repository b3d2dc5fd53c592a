"""The part of a configuration that text models read."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


@cache
def _parameter_names(function: Any) -> frozenset[str]:
    """Return the names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def text_config(config: Any, **which: bool) -> Any:
    """Return the part of a config that text models read; the whole config if it has no parts.

    `which` is `decoder` or `encoder`, for configs that have one for each.
    """
    if hasattr(config, "get_text_config"):
        # of the two, `decoder` alone up to 4.53
        taken = _parameter_names(type(config).get_text_config)
        return config.get_text_config(
            **{name: value for name, value in which.items() if name in taken}
        )
    part = getattr(config, "text_config", None)  # transformers 4.44
    return part if hasattr(part, "model_type") else config
