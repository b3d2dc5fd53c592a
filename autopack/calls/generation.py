"""Who calls: transformers' generation, whose masks, positions and caches are its own, or one of its pipelines."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from autopack.runtime.model import EnabledModel

_GENERATION = "transformers.generation."
_SCORING = (("transformers.pipelines.", "_forward"), ("sentence_transformers.", None))


def generates(model: EnabledModel) -> bool:
    """Whether this model is called by transformers' generation of its own tokens, and not inside that of another.

    Positions of generation go on past padding, and restart there, without a document that begins.
    """
    return not torch.is_grad_enabled() and _is_called_from(_GENERATION, model)


def is_only_scored(model: EnabledModel) -> bool:
    """Whether sentence-transformers, or the step of a pipeline that runs models, calls this one: both drop its cache.

    Generation in a pipeline is `generates`.
    """
    return any(_is_called_from(place, model, function) for place, function in _SCORING)


def _is_called_from(place: str, model: EnabledModel, function: str | None = None) -> bool:
    """Whether a function of a module under `place` that is running holds this model."""
    if torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_globals.get("__name__", "").startswith(place)
            and function in (None, frame.f_code.co_name)
            and _holds(frame.f_locals.get("self"), model)
        ):
            return True
        frame = frame.f_back
    return False


def _holds(caller: Any, model: EnabledModel) -> bool:
    """Whether the caller is the model, has it as a part, or keeps the one or the other as its `model`."""
    held = caller if isinstance(caller, nn.Module) else getattr(caller, "model", None)
    if not isinstance(held, nn.Module):
        return False
    entries = model.anatomy.entries
    return any(held is entry for entry in entries) or any(part is entries[0] for part in held.modules())
