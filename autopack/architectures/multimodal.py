"""X"""
from autopack.architectures import Family
__all__ = ["FAMILY"]
_ALL = """aria aya_vision blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid dots3_note emu3 ernie4_5_vl_moe exaone4_5 gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 granite4_vision granite_docling hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 muse_glimmer ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp shieldgemma2 smolvlm step3p7 unlimited_ocr video_llama_3 video_llava vipllava hunyuan_vl"""
FAMILY = Family(name="multimodal", model_types=frozenset(), path="", media_types=frozenset(_ALL.split()))
