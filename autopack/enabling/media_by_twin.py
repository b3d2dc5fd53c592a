"""Whether documents with images, videos or sounds get what they get alone in packed rows: asked of a tiny twin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel
from transformers import __version__ as release

from autopack.auditing.left_as_found import left_as_found
from autopack.enabling import twin_calls
from autopack.enabling.attach import detach
from autopack.enabling.by_twin import enabled_like
from autopack.enabling.twin_calls import MakeTwin, Results
from autopack.proving.twin import NoTwin
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import stock
from autopack.tiny import images, media_rows, sounds
from autopack.tiny.images import IMAGE, as_videos
from autopack.tiny.media_rows import Document
from autopack.tiny.sounds import SOUND
from autopack.trust.data import load

_PARTS: tuple[tuple[int | str, ...], ...] = ((3, "medium"), ("medium", 4), (7,), (2, "medium", 3, "medium"))
"""Runs of text, and media, over and over: some touch across the end of a document, and some documents have none."""
_MOST = 256
"""Of more media in a call than this no twin is asked."""


def is_recorded(enabled: EnabledModel) -> bool:
    """Whether a released run has measured documents with the media of its type in the very code of a model."""
    return enabled.proof.source == "recorded" and release == load()["with"]["transformers"]


def why_apart(model: PreTrainedModel, enabled: EnabledModel, kind: str, count: int) -> str | None:
    """Why documents with `count` media of a kind may not get what they get alone, in words; None where its twin's do.

    `kind` is "image", "video" or "sound". Norms over a batch stay in evaluation: while they train, such calls raise.
    """

    if count > _MOST:
        return f"a call has more than {_MOST} {kind}s or documents, of which no twin is asked"

    def ask(make: MakeTwin, dtype: torch.dtype) -> str | None:
        twin = make()
        found = _documents(twin, kind, count)
        wanted: Results = {}
        got: Results = {}
        twin_enabled = enabled_like(twin, enabled)
        try:
            with twin_enabled.settling():
                for training in (False, True):
                    with left_as_found(twin):  # without dropout
                        _to(twin, training)
                        with stock(twin_enabled):
                            wanted |= _alone(twin, found, training)
                        got |= _together(twin, found, training)
        finally:
            detach(twin, twin_enabled)
        return twin_calls.difference(got, wanted, dtype)

    return twin_calls.why_not(model, enabled, f"documents with {count} {kind}s", ask)


def _to(model: torch.nn.Module, training: bool) -> None:
    model.train(training)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def _documents(twin: PreTrainedModel, kind: str, count: int) -> list[Document]:
    """Different documents with media of this kind, as far as the type can be run without: `count`, and as many media.

    Raises `NoTwin` where nobody knows how the type takes them.
    """
    model: Any = twin
    if media_rows.form_of(model, "sounds" if kind == "sound" else "images") is None:
        raise NoTwin(f"nobody knows how a tiny {model.config.model_type!r} takes {kind}s")
    medium = SOUND if kind == "sound" else IMAGE
    chosen = itertools.islice(itertools.cycle(_PARTS), count)
    parts = [[medium if part == "medium" else part for part in each] for each in chosen]
    if kind == "sound":
        return [sounds.document(model, each, seed=n + 1, frames=sounds.FRAMES) for n, each in enumerate(parts)]
    parts = [each for each in parts if medium in each or not images.needs_images(model)]
    found = [images.document(model, each, seed=n + 1) for n, each in enumerate(parts)]
    return [as_videos(model, each) for each in found] if kind == "video" else found


def _alone(twin: Any, found: Sequence[Document], training: bool) -> Results:
    return _results(twin, [media_rows.alone(twin, each).logits[0] for each in found], training)


def _together(twin: Any, found: Sequence[Document], training: bool) -> Results:
    logits = twin(**media_rows.packed(twin, [found])).logits
    return _results(twin, [logits[row, a:b] for _, row, a, b in media_rows.spans([found])], training)


def _results(twin: Any, parts: list[torch.Tensor], training: bool) -> Results:
    logits = torch.cat(parts)
    # Some forbid tokens by the least number of a precision, of which no sum has a gradient (Chameleon).
    shown = logits.where(logits.detach().abs() < torch.finfo(logits.dtype).max / 2, torch.zeros_like(logits))
    twin.zero_grad(set_to_none=True)
    (shown * twin_calls.weights_of(shown.shape, shown)).sum().backward()
    return {f"logits {training}": shown.detach(), f"gradient {training}": twin_calls.gradients_of(twin)}
