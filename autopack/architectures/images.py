"""Models whose text reads images without places among its tokens: across, from an encoder, or
before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autopack.family import Family, MixerCall, Tiny, Way, named
from autopack.layout.host import upload
from autopack.layout.packed import real_documents
from autopack.layout.token_map import Batches, TokenMap, equally_long_documents
from autopack.mixers import ALONE, RELATIVE, Restarting
from autopack.mixers.alone import run_documents_alone

# Text attends to images across, through layers of its own; each document reads its own images. A
# mask says which tokens see which images of their row. A token that sees none is let see all of
# them upstream, which in a packed row would be those of other documents, and in a padded batch
# those that fill up the row (modeling_mllama.py: `cross_attention_mask *=
# full_text_row_masked_out_mask`), so attention gets nothing else to see.
MLLAMA = Family.of(
    "cross_attention",
    "mllama",
    "attention site, document by document; each reads its own images across",
    image_mask="cross_attention_mask",
    refused_arguments={
        "cross_attention_states": "what the images have become came without them, and which states "
        "are whose is not known"
    },
)

# Upstream runs no document without pixels: one that has no image brings an empty one that no token
# sees.
IDEFICS = Family.of(
    "idefics",
    "idefics",
    "attention site, document by document; each reads its own images across",
    within_token="IdeficsVisionTransformer IdeficsPerceiverResampler",
    image_mask="image_attention_mask",
    tiny=Tiny(needs_images=named("idefics")),
)

# Captions attend across to their image, one for each document, in code of their own.
BLIP = Family.of(
    "blip",
    "blip",
    "the model's own attention, documents alone, and across to the image of each",
    mixers={"BlipTextSelfAttention": ALONE},
    image_of_each="blip",
    tiny=Tiny(needs_images=named("blip")),
)

# Its text attends to proteins across, through layers of their own.
EVOLLA = Family.of(
    "evolla",
    "evolla",
    "attention site, document by document; text alone",
    refused_arguments={
        "protein_input_ids": (
            "its text attends to proteins across, so every document of a row would see those of all"
        )
    },
)


_OF_INPUT_IDS = Restarting(reads_encoder_tokens=True)

# The encoder runs as it is, on one image for each document of the decoder. PP-FormulaNet makes its
# decoder's tokens of `input_ids` where it gets none, and never of labels.
IMAGE_ENCODERS = Family.of(
    "image_encoders",
    "pix2struct pp_formulanet",
    "the encoder as it is, an image for each document; attention document by document in the "
    "decoder",
    mixers={
        "Pix2StructTextAttention": RELATIVE,
        "PPFormulaNetLearnedPositionalEmbedding": _OF_INPUT_IDS,
    },
    # the last is served as its decoder is
    tiny=Tiny(needs_images=named("pix2struct pp_formulanet vision-encoder-decoder")),
)


_PIXELS = "pixel_values"


class _AfterAnImage(Way):
    """Strategy for GIT, which puts an image's states before the text, where rows have no places.

    Documents with images run alone, each with its own image, (documents, ...) in their order. Text
    alone stays in its rows, and its attention runs on documents alone.
    """

    attends = True
    recurs = False

    def run(self, call: MixerCall) -> Any:
        arguments = dict(call.arguments)
        pixels, layout = arguments.pop(_PIXELS, None), call.layout
        if pixels is None:
            return call.changed(lambda name, value: value)
        groups = equally_long_documents(layout)
        image = np.cumsum(real_documents(layout)) - 1
        maps = Batches.grouped(layout, equally_long_documents).maps
        batches = iter(zip(groups, maps, strict=True))

        def original(model: Any, **given: Any) -> Any:
            documents, batch = next(batches)
            own = pixels[upload(image[documents], pixels.device)]
            return _of_text(call.original(model, **given, **{_PIXELS: own}), batch)

        return run_documents_alone(
            replace(call, original=original, arguments=arguments), numbers_itself=True
        )


def _of_text(output: Any, batch: TokenMap) -> Any:
    """Return an output with the states of the text alone, and without attention weights."""
    tokens = batch.into[1]

    def cut(states: Any) -> Any:
        if isinstance(states, tuple):
            return tuple(map(cut, states))
        return states[:, -tokens:] if torch.is_tensor(states) and states.dim() == 3 else states

    return type(output)(
        **{name: cut(value) for name, value in output.items() if name != "attentions"}
    )


# The loss of upstream leaves out as many tokens as an image has, whether there is one or not, so
# labels need images.
GIT = Family.of(
    "git",
    "git",
    "the model's own attention, documents alone; with images the whole model, each document after "
    "its own",
    mixers={"GitForCausalLM GitModel": _AfterAnImage(), "GitSelfAttention": ALONE},
    refused_without_images={
        "labels": "its loss leaves out as many tokens at the start of a row as an image has",
    },
    image_of_each="git",
)
