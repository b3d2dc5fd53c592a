"""GIT: the states of an image stand before the text, which has no places for them, so such documents are run alone.

Of the logits and states of a document those of its text are kept. The loss of upstream leaves out as many tokens as an
image has, whether there is one or not, so labels need images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopack.family import Family, MixerCall, Tiny, Way
from autopack.layout.batches import Batches, DocumentBatch, equally_long_documents
from autopack.mixers import ALONE
from autopack.mixers.whole_model import run_documents_alone

_PIXELS = "pixel_values"
_TYPES = frozenset({"git"})


class _AfterAnImage(Way):
    """The whole model on documents alone, each with its own image, (documents, ...) in their order; text alone stays in
    its rows, where attention is run on documents alone."""

    attends = True
    recurs = False
    words = "with images, whole model per document"
    work = "with images, the whole model, documents of one length as a batch"

    def run(self, call: MixerCall) -> Any:
        arguments = dict(call.arguments)
        pixels, layout = arguments.pop(_PIXELS, None), call.layout
        if pixels is None:
            return call.changed(lambda name, value: value)
        found = Batches.grouped(layout, equally_long_documents).batches
        place = {number: image for image, number in enumerate(sorted(n for batch in found for n in batch.documents))}
        batches = iter(found)

        def original(model: Any, **given: Any) -> Any:
            batch = next(batches)
            own = torch.tensor([place[number] for number in batch.documents], device=pixels.device)
            return _of_text(call.original(model, **given, **{_PIXELS: pixels[own]}), batch)

        return run_documents_alone(replace(call, original=original, arguments=arguments), numbers_itself=True)


def _of_text(output: Any, batch: DocumentBatch) -> Any:
    """An output without what it has for the image, which stands before the tokens; weights of pairs are left out."""
    tokens = batch.shape[1]

    def cut(states: Any) -> Any:
        if isinstance(states, tuple):
            return tuple(map(cut, states))
        return states[:, -tokens:] if torch.is_tensor(states) and states.dim() == 3 else states

    return type(output)(**{name: cut(value) for name, value in output.items() if name != "attentions"})


_WITH_IMAGES = _AfterAnImage()
_REASON = "its loss leaves out as many tokens at the start of a row as an image has"

FAMILY = Family(
    name="git",
    model_types=_TYPES,
    how="the model's own attention, documents alone; with images the whole model, each document after its own",
    attends=False,
    mixers={"GitForCausalLM": _WITH_IMAGES, "GitModel": _WITH_IMAGES, "GitSelfAttention": ALONE},
    refused_without_images={"labels": _REASON},
    media_types={"image": _TYPES},
    image_of_each=_TYPES,
    tiny=Tiny(images={"square beside text": _TYPES}),
)
