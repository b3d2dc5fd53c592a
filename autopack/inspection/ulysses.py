"""DeepSpeed's attention over rows that ranks share (ALST), as it is registered with transformers.

`UlyssesSPAttentionHF.register_with_transformers` puts a function around the registered one, which exchanges tokens for
heads, calls that for whole rows without a mask, and so knows of no documents but by what flash attention makes of
positions.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def exchange_of(function: Any) -> Any:
    """DeepSpeed's module behind a registered attention function; None where that is another one, or not as known."""
    function = beneath_ours(function)
    if not isinstance(function, FunctionType) or function.__module__ != _MODULE:
        return None
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    found = next((cell for cell in cells if isinstance(cell, nn.Module)), None)
    return found if hasattr(found, "process_group") and callable(getattr(found, "attn", None)) else None


def of_whole_rows(function: Any) -> Any:
    """The attention function that runs on whole rows: the one around which DeepSpeed has put its own, or itself."""
    found = exchange_of(function)
    return function if found is None else beneath_ours(found.attn)


def exchanges_now(exchange: Any, training: bool) -> bool:
    """Whether it shares rows in a call of a model in this mode."""
    return training or not getattr(exchange, "disable_in_eval", False)


def beneath_ours(function: Any) -> Any:
    """What a function of autopack's stands for; any other is itself."""
    while (inner := getattr(function, "autopack_original", None)) is not None:
        function = inner
    return function
