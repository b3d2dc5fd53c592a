"""Models of text and images (videos, sounds) whose features take the places of placeholder tokens.

Upstream numbers a row of several documents as one (M-RoPE), and its masks let them see each other.
Positions are computed for each document by the model's own function (`calls.with_media`). Blocks of
image tokens that see each other, and prefixes that do, are rules over tokens, applied within
documents alone. Features are put in the order of the flattened rows, so media in the order of the
documents reach their own document. Vision towers keep their images apart by themselves, as does
Kosmos-2.5's projection. Emu3's tokenizer of images (`BatchNorm3d`) and FastVLM's tower (FastViT of
timm, `BatchNorm2d`) do so in evaluation alone; while they train, packed calls with images raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autopack.family import AFTER_PAD_TOKEN, Family, MixerCall, Numbering, Tiny, Way, named
from autopack.layout.host import host_values, upload
from autopack.layout.packed import real_documents
from autopack.layout.token_map import Batches, TokenMap, equally_long_documents
from autopack.mixers import ALONE, RELATIVE, Restarting
from autopack.mixers.alone import run_documents_alone

_TYPES = """
aria aya_vision blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
deepseek_ocr2 deepseek_vl deepseek_vl_hybrid dots3_note emu3 ernie4_5_vl_moe exaone4_5 fast_vlm
glm46v glm4v glm4v_moe glm_ocr glmga granite4_vision granite_docling hyperclovax_vision_v2 idefics2
idefics3 instructblip instructblipvideo internvl janus kimi_k25 kosmos-2 kosmos-2.5 lighton_ocr
llava llava_next llava_next_video llava_onevision mistral3 mistral_large4 muse_glimmer muse_spark
ovis2 paddleocr_vl paligemma perception_lm pp_chart2table qianfan_ocr qwen2_5_omni_thinker
qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm step3p7
unlimited_ocr video_llama_3 video_llava vipllava
"""
_WITH_VIDEOS = """
cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe
glm_ocr glmga hyperclovax_vision_v2 kimi_k25 llava_next_video llava_onevision muse_glimmer
muse_spark perception_lm qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl
qwen3_vl_moe video_llama_3 video_llava
"""


MULTIMODAL = Family.of(
    "multimodal",
    _TYPES,
    "attention site, document by document; positions by document; images in the order of the "
    "documents",
    numbering={
        "kosmos_2_text_model kosmos_2_5_text_model": AFTER_PAD_TOKEN,
        "paligemma colpali": Numbering(start=1, relative=True),
    },
    within_token=(
        "Kosmos2ImageToTextProjection Kosmos2_5ImageToTextProjection Emu3VQVAEAttentionBlock"
    ),
    dense_types="dots3_note",
    unpads_images="paligemma shieldgemma2",
    refusal=lambda config: (
        None
        if getattr(config, "use_decoder_only_language_model", True)
        else f"its language model ({config.text_config.model_type!r}) is an encoder-decoder inside "
        "of a model for images, which is not served"
    ),
    media_types={"video": _WITH_VIDEOS},
)

_NUMBERS, _IMAGE_GRIDS, _CROPS = "image_token_pooling", "image_grids", "image_num_crops"


def _misplaced(given: Mapping[str, Any]) -> str | None:
    """Return the reason why patch numbers do not count over all images of a call, or None.

    Molmo2's processor counts over all images of one call of it. If it processes documents one by
    one, numbers count from 0 in each, and end to end all images would pool the patches of the
    first.
    """
    pixels = given.get("pixel_values")
    if pixels is None:
        return None
    lacking = next(
        (name for name in (_NUMBERS, _IMAGE_GRIDS, _CROPS) if given.get(name) is None), None
    )
    if lacking is not None:
        return (
            f"{lacking} is missing, and only it tells whose patches are pooled; pass what the "
            "processor gives"
        )
    numbers, grids, crops = (host_values(given[name]) for name in (_NUMBERS, _IMAGE_GRIDS, _CROPS))
    numbers = numbers[(numbers >= 0).any(axis=-1)]  # the model leaves out places without patches
    places = grids[:, 0] * grids[:, 1] + grids[:, 2] * grids[:, 3]
    each = pixels.shape[-2]  # patches of a crop
    if (
        len(crops) != len(grids)
        or places.sum() != len(numbers)
        or crops.sum() * each != np.prod(pixels.shape[:-1])
    ):
        return f"{_NUMBERS}, {_IMAGE_GRIDS}, {_CROPS} and pixel_values are not of the same images"
    owner = np.repeat(np.arange(len(places)), places)[:, None]
    taken = np.searchsorted(np.cumsum(crops) * each, numbers, side="right")
    wrong = ((numbers >= 0) & (taken != owner)).any(axis=-1)
    if not wrong.any():
        return None
    image = int(owner[wrong][0, 0])
    return (
        f"{_NUMBERS} of image {image} names patches of other images. It counts over all images of "
        "the call; where each document was processed by itself, add the patches before it, as "
        "autopack.PackingCollator does"
    )


MOLMO2 = Family.of(
    "molmo2",
    "molmo2",
    "attention site, document by document; numbers of patches over all images of a call",
    wrong_media=_misplaced,
)

# One of its axes of positions numbers the images, and upstream goes on counting from row to row. So
# documents are numbered one at a time, as rows of their own, and each gets the numbers that it has
# alone.
HUNYUAN_VL = Family.of(
    "hunyuan_vl",
    "hunyuan_vl",
    "attention site, document by document; positions document by document; images in the order of "
    "the documents",
    counts_images="hunyuan_vl",
)


# --- Models whose text reads images without places among its tokens: across, from an encoder, or
# before it.

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
)


_PIXELS = "pixel_values"


class _AfterAnImage(Way):
    """Strategy for GIT, which puts an image's states before the text: such documents run alone.

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
        "labels": "its loss leaves out as many tokens at the start of a row as an image has"
    },
    image_of_each="git",
)
