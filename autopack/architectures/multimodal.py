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
from typing import Any

import numpy as np

from autopack.family import AFTER_PAD_TOKEN, Family, Numbering, Tiny, named
from autopack.layout.host import host_values

_GRID = """
cohere_compass cosmos3_edge cosmos3_omni dots3_note ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe
glm_ocr glmga hyperclovax_vision_v2 muse_glimmer muse_spark qwen2_5_omni_thinker qwen2_5_vl qwen2_vl
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe video_llama_3
"""
_VIDEO_TYPES = f"{_GRID} kimi_k25 llava_next_video llava_onevision perception_lm video_llava"
_IMAGES = {
    "grid": _GRID,
    "flattened patches": "kosmos-2.5",
    "grid of squares": "kimi_k25 paddleocr_vl",
    "square": """
aria aya_vision blip-2 chameleon cohere2_vision deepseek_vl fast_vlm internvl janus kosmos-2 llava
ovis2 pp_chart2table qianfan_ocr shieldgemma2 video_llava vipllava
""",
    "square and instructions": "instructblip",
    "frames and instructions": "instructblipvideo",
    "square after a prefix": "paligemma",
    "two resolutions": "deepseek_vl_hybrid",
    "square and crops": "step3p7",
    "square and grids of crops": "unlimited_ocr",
    "sized": "emu3 lighton_ocr mistral3 mistral_large4",
    "tiles": "granite4_vision llava_next llava_next_video llava_onevision",
    "tiles alone": "perception_lm",
    "views": "deepseek_ocr2",
    "nested": "idefics2 idefics3 smolvlm",
    "nested, masked": "granite_docling",
}
_TYPES = named(" ".join(_IMAGES.values()))


_KOSMOS_TEXT = ("kosmos_2_text_model", "kosmos_2_5_text_model")


def _refusal(config: Any) -> str | None:
    """Return the reason to refuse a model with an encoder-decoder as language model, or None."""
    if getattr(config, "use_decoder_only_language_model", True):
        return None
    return (
        f"its language model ({config.text_config.model_type!r}) is an encoder-decoder inside of a "
        "model for images, which is not served"
    )


MULTIMODAL = Family(
    name="multimodal",
    model_types=_TYPES,
    how=(
        "attention site, document by document; positions by document; images in the order of the "
        "documents"
    ),
    numbering=dict.fromkeys(_KOSMOS_TEXT, AFTER_PAD_TOKEN)
    | dict.fromkeys(("paligemma", "colpali"), Numbering(start=1, relative=True)),
    within_token=frozenset(
        {
            "Kosmos2ImageToTextProjection",
            "Kosmos2_5ImageToTextProjection",
            "Emu3VQVAEAttentionBlock",
        }
    ),
    dense_types=named("dots3_note"),
    unpads_images=named("paligemma shieldgemma2"),
    refusal=_refusal,
    media_types={"video": named(_VIDEO_TYPES)},
    tiny=Tiny(
        needs_images=named("blip-2 instructblip instructblipvideo kosmos-2"),
        images={form: named(types) for form, types in _IMAGES.items()},
    ),
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


MOLMO2 = Family(
    name="molmo2",
    model_types=named("molmo2"),
    how="attention site, document by document; numbers of patches over all images of a call",
    wrong_media=_misplaced,
    tiny=Tiny(images={"numbered patches": named("molmo2")}),
)

# One of its axes of positions numbers the images, and upstream goes on counting from row to row. So
# documents are numbered one at a time, as rows of their own, and each gets the numbers that it has
# alone.
HUNYUAN_VL = Family(
    name="hunyuan_vl",
    model_types=named("hunyuan_vl"),
    how=(
        "attention site, document by document; positions document by document; images in the "
        "order of the documents"
    ),
    counts_images=named("hunyuan_vl"),
    tiny=Tiny(images={"grid": named("hunyuan_vl")}),
)
