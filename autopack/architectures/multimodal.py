"""Models of text and images (videos, sounds) whose features take the places of placeholder tokens.

Where a row holds several documents, upstream numbers it as one (M-RoPE), and its masks let them see each other. The
features need no care: they are put in the order of the flattened rows, so media that come in the order of the documents
reach their own. Positions are computed for each document by the model's own function (`autopack.numbering`); blocks of
image tokens that see each other and prefixes that do are rules over tokens, asked within documents alone. Vision towers
keep their images apart by themselves.

`media_types` holds the types of all families that a run of the leak test has covered with images or videos in the
documents (`python -m compat.exactness --task image-text-to-text`). Sounds have not been run, so they are refused.
"""

from autopack.family import Family

__all__ = ["FAMILY"]

_TEXT = """
aria aya_vision chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid
dots3_note emu3 ernie4_5_vl_moe exaone4_5 glm46v glm4v glm4v_moe glm_ocr glmga granite_docling hyperclovax_vision_v2
idefics2 idefics3 internvl janus kimi_k25 kosmos-2.5 lighton_ocr llava llava_next llava_next_video llava_onevision
mistral3 mistral_large4 muse_glimmer ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker
qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm step3p7 unlimited_ocr
video_llama_3 video_llava vipllava
"""
"""Types whose text part mixes tokens by attention alone."""
_WITH_IMAGES = """
aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl dots3_note ernie4_5_vl_moe exaone4_5
gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm_ocr glmga got_ocr2 hyperclovax_vision_v2 idefics2
idefics3 internvl janus kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
minimax_m3_vl mistral3 mistral_large4 muse_glimmer ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr
qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp
shieldgemma2 smolvlm video_llama_3 video_llava vipllava
"""
_WITH_VIDEOS = """
cohere_compass cosmos3_edge cosmos3_omni dots3_note exaone4_5 hyperclovax_vision_v2 kimi_k25 lfm3_vl minimax_m3_vl
muse_glimmer qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp video_llama_3
"""

FAMILY = Family(
    name="multimodal",
    model_types=frozenset(_TEXT.split()),
    path="attention site, document by document; positions by document; images in the order of the documents",
    dense_types=frozenset({"dots3_note"}),
    media_types={"image": frozenset(_WITH_IMAGES.split()), "video": frozenset(_WITH_VIDEOS.split())},
)
