"""Decoders, and encoders with a language-modelling head, that mix tokens only by attention through
the interface.

They leak because transformers splits masks by documents only if `position_ids` reach the mask
function without a mask or a cache, and many of these types never pass positions on. Here every
attention call is made within documents, so nothing depends on the mask code. The list holds the
types that `python -m compat.exactness` has measured; any other model of this structure is served
as well.
"""

from __future__ import annotations

from typing import Any

from autopack.family import AFTER_PAD_TOKEN, DERIVED, Family, Numbering, Tiny

_DECODERS = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation biogpt bitnet camembert cohere
cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3
deepseek_v32 diffllama dots1 dots3_note_text electra emu3_text_model ernie ernie4_5 ernie4_5_moe
exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe
kolibri1 laguna llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3
mistral mixtral mllama_text_model modernbert-decoder moonshine moshi moss_transcribe_diarize
nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2
qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm
starcoder2 t5gemma vaultgemma whisper xlm-roberta xlm-roberta-xl xmod youtu
"""

_ENCODERS = """
albert distilbert esmc eurobert gte jina_embeddings_v3 layoutlm modernbert modernvbert neomme nomic_bert
ultrabert ultravbert
"""

_AFTER_PAD_TOKEN = """
altclip_text_model bridgetower_text_model camembert clap_text_model data2vec-text esm layoutlmv3
lilt markuplm roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
"""

_BERT_KIN = """
bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta
xlm-roberta-xl xmod
"""

_PATCHES = frozenset("gemma4 gemma4_unified".split())

_SLIDING_AND_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_FULL_AND_SLIDING: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"]}
_DENSE_AND_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_WINDOW = _FULL_AND_SLIDING | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_TWICE = {"layer_types": _SLIDING_AND_FULL["layer_types"] * 2, "num_kv_shared_layers": 2}
_GEMMA4 = _TWICE | {"global_head_dim": 32}
_POOLED = {"pooling_kernel_size": 2}
_SEEING_IMAGES_WHOLE = {"text_config": {"use_bidirectional_attention": "vision"}}

_M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_ROPE = {"sliding_attention": _M_ROPE, "full_attention": None}
_PHI4_WIDTHS = "ext_pw_out_channel depthwise_separable_out_channel".split()
_STAND_IN = {"vocab_size": 8, "vocab_offset": 120, "rms_norm_eps": 1e-6}

_TINY: dict[str, dict[str, Any]] = {
    "cohere2_moe": _SLIDING_AND_FULL | _DENSE_AND_SPARSE,
    "cohere_compass_text": _SLIDING_AND_FULL | {"rope_parameters": _ROPE},
    # 5.0 takes the experts' width for the router's input
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}},
    "diffusion_gemma": {"canvas_length": 8},
    "diffusion_gemma_text": _SLIDING_AND_FULL
    | {"global_head_dim": 32, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "dots1": _FULL_AND_SLIDING
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 1},
    "dots3_note_text": _DENSE_AND_SPARSE
    | {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 4, "head_dim": 16}
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 28,
    }
    | {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 12},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "esmc": {"num_key_value_heads": 4},
    "flint": {"mlp_only_layers": [0]},
    "gemma2": _SLIDING_AND_FULL,
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": {"vision_soft_tokens_per_image": 16, "audio_soft_tokens_per_image": 8},
    "gemma3n_audio": {"sscp_conv_channel_size": [8, 8], "vocab_size": 4, "vocab_offset": 124}
    | {"conf_num_hidden_layers": 2, "conf_reduction_factor": 2},
    "gemma3n_text": _TWICE | {"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 8},
    "gemma4": _SEEING_IMAGES_WHOLE,
    "gemma4_text": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified": _SEEING_IMAGES_WHOLE,
    "gemma4_unified_text": _GEMMA4,
    "gemma4_unified_vision": _POOLED | {"mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
    "gemma4_vision": _POOLED,
    "glm_moe_dsa": {"layer_types": ["indexed_attention"] * 3, "indexer_types": ["full", "full", "shared"]}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "got_ocr2_vision": {"output_channels": 16},
    "granite_speech_encoder": {"hidden_dim": 64},
    "granite_speech_plus_encoder": {"hidden_dim": 64},
    "laguna": _FULL_AND_SLIDING | _DENSE_AND_SPARSE | {"num_attention_heads_per_layer": [4, 8]},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"zero_expert_num": 2},
    "mellum": _FULL_AND_SLIDING | _DENSE_AND_SPARSE,
    "minicpm3": {"dim_model_base": 64},
    "ministral": _SLIDING_AND_FULL,
    "mistral4": {"head_dim": DERIVED},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    | {"rope_scaling": {"rope_type": "default"}},
    "modernbert": {"local_attention": 8},
    "modernbert-decoder": {"local_attention": 8},
    "phi4_multimodal_audio": dict.fromkeys(_PHI4_WIDTHS, 64)
    | {"nemo_conv_channels": 16, "chunk_size": -1, "num_blocks": 2},
    "qwen2": _WINDOW,
    "qwen2_moe": _WINDOW | {"mlp_only_layers": [0]},
    "qwen3": _WINDOW,
    "qwen3_moe": {"mlp_only_layers": [0]},
    "roc_bert": {"pronunciation_vocab_size": 128, "pronunciation_embed_dim": 16}
    | {"shape_vocab_size": 128, "shape_embed_dim": 16},
    "smollm3": _FULL_AND_SLIDING
    | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "no_rope_layers": [1, 0],
    },
    # it adds noise to what it encodes, in evaluation too
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7, "vae_std": 0.0},
    "xmod": {"default_language": "en_XX"},
}

FAMILY = Family(
    name="attention",
    model_types=frozenset((_DECODERS + _ENCODERS).split()),
    how="attention site, document by document",
    numbering=dict.fromkeys(_AFTER_PAD_TOKEN.split(), AFTER_PAD_TOKEN)
    | {"biogpt": Numbering(changed=True), "opt": Numbering(along_mask=True)},
    media_types={"video": _PATCHES, "sound": frozenset({"moonshine", "whisper"})},
    unpads_images=frozenset("gemma3 gemma4 gemma4_unified".split()),
    dense_types=frozenset("axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4".split()),
    tiny=Tiny(
        configs=_TINY,
        causal={name: {"is_decoder": True} for name in _BERT_KIN.split()},
        parts={
            "gemma4": {"vision_config": "gemma4_vision"},
            "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
            "phi4_multimodal": {
                "vision_config": "phi4_multimodal_vision",
                "audio_config": "phi4_multimodal_audio",
            },
        },
        stand_ins={"gemma3n": {"vision_config": ("siglip_vision_model", _STAND_IN)}},
        images={
            "square": frozenset("gemma3 gemma3n got_ocr2".split()),
            "patches": _PATCHES,
            "flat patches": frozenset({"fuyu"}),
        },
    ),
)
