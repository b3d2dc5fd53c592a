"""The functions that are running in this thread."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

FORWARDS = ".*forward.*"
"""Pattern of the names of functions that call modules."""
STEPS = "training_step|prediction_step"
"""Pattern of the names of methods that train and evaluate, with the trainer as `self`."""


def running(module: str = "", function: str = ".*") -> list[FrameType]:
    """Return the frames of functions that are running, the innermost first.

    They are of Python modules whose names begin with `module`, and have names that match the
    pattern `function` as a whole.
    """
    named = re.compile(function).fullmatch
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if named(frame.f_code.co_name) and frame.f_globals.get("__name__", "").startswith(module):
            found.append(frame)
        frame = frame.f_back
    return found


def callers(module: str = "", function: str = ".*") -> list[Any]:
    """Return `self` of each of the `running` methods, the innermost first; None for functions.

    Up to Python 3.12 this keeps the locals of a frame alive until it ends, so ask for few
    functions.
    """
    return [frame.f_locals.get("self") for frame in running(module, function)]
