"""Functions that `torch.compile` leaves out of its graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def untraced(reason: str) -> Callable[[Callable[..., Any]], Any]:
    """Break the graph at a function; Dynamo tells the reason where the graph must not break (from torch 2.7 on)."""
    takes_reason = "reason" in inspect.signature(torch._dynamo.disable).parameters
    return partial(torch._dynamo.disable, reason=reason) if takes_reason else torch._dynamo.disable
