"""What `compat.exactness` measures of a type with documents that have sounds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import autopack
from autopack import registry, tiny
from autopack.errors import AutopackError
from autopack.tiny import media_rows, sounds
from autopack.tiny.media_rows import Document
from autopack.tiny.sounds import SOUND
from compat.images import compare, failed, judged

# The first ends where the next begins with a sound. One document has none.
DOCUMENTS: tuple[tuple[int | str, ...], ...] = (
    (3, SOUND),
    (SOUND, 4),
    (7,),
    (2, SOUND, 3, SOUND, 4),
)

ABOUT_SOUNDS = (
    "A second result is that of documents with sounds beside text (docs/media.md), in one row and "
    "in two, with a document that has none, two that touch with their sounds, and one with two; "
    "sounds have different lengths, or, where it says `alike`, one length, since packed calls with "
    "others raise. Gradients include those of the encoder of sounds, and another text or sound of "
    "one document leaves the others as they were."
)


# Whole dictionaries: these types have no such part by default, so nothing shrinks it.
_WITH_SOUNDS = json.loads(Path(__file__).with_name("sounds.json").read_text())


def overrides(model_type: str) -> dict[str, Any]:
    """Fields for `tiny.build` by which types get an encoder of sounds that is optional."""
    found = _WITH_SOUNDS.get(model_type)
    return {} if found is None else {"audio_config": copy.deepcopy(found)}


def documents(
    model: Any, parts: Sequence[Sequence[int | str]] = DOCUMENTS, *, alike: bool = False
) -> list[Document]:
    """One document for each list of parts, all different; `alike`: with sounds of one length."""
    frames = sounds.FRAMES if alike else None
    return [
        sounds.document(model, each, seed=number + 1, frames=frames)
        for number, each in enumerate(parts)
    ]


def with_sounds(build: Callable[..., Any], model_type: str, dtype: torch.dtype) -> dict[str, Any]:
    """The worst errors of documents with sounds, of several lengths where the type is served with
    them, or of one.

    `build` makes a tiny model of the type with further fields of the configuration: with an encoder
    of sounds, where there is none by default. Returns nothing for a type without sounds, and
    otherwise `sounds`: exact, with `sounds alike` where they have to have one length, LEAK,
    undeclared, refused or upstream error."""
    try:
        stock = build(**overrides(model_type))
    except tiny.CannotBuild as error:
        return {"sounds": "unbuildable", "sounds reason": error.reason}
    if media_rows.form_of(stock, "sounds") is None:
        return {}
    model = build(**overrides(model_type))
    with autopack.enable(model, verify=False):
        assert "sound" in registry.media_of(model.config.model_type)
        alike, why = False, ""
        try:
            try:
                errors = compare(model, stock, found=documents(stock))
            except AutopackError as error:
                alike, why = True, error.message.partition(". ")[0]
                errors = compare(model, stock, found=documents(stock, alike=True))
        except Exception as error:
            return failed("sounds", stock, documents(stock), error)
    found = judged("sounds", errors, dtype)
    return {**found, "sounds alike": why} if alike else found
