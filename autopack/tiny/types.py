"""What single model types need beyond the general rules, as data."""

from __future__ import annotations

from typing import Any

from autopack.tiny.composites import COMPOSITES

# The value that leaves a field to the configuration class, although a general rule would set it.
DERIVED = ...

DECODER = {"is_decoder": True}
MAKES_A_DECODER = {"is_decoder", "attn_type"}
"""Settings that types have here for causal language modelling alone."""
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
FULL_AND_SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
QWEN_WINDOW = FULL_AND_SLIDING | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
# Three sections, as for images, of the four frequencies that half of a head of 16 has.
M_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
GEMMA4 = {"global_head_dim": 32, "num_kv_shared_layers": 2} | {"layer_types": SLIDING_AND_FULL["layer_types"] * 2}
MUSICGEN = {"decoder": {"num_codebooks": 1}}

# Nested dictionaries go to the sub-configuration of that name, which also gets what its own type has here.
TYPES: dict[str, dict[str, Any]] = COMPOSITES | {
    "bailing_hybrid": {"head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "bert": DECODER,
    "bert-generation": DECODER,
    "big_bird": DECODER | {"attention_type": "original_full"},
    "blt": {
        "vocab_size": 260,
        "patch_size": 4,
        "encoder_hash_byte_group_vocab": 61,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": 64},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": 64},
    },
    "camembert": DECODER,
    "cohere2_moe": SLIDING_AND_FULL | {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": SLIDING_AND_FULL
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        }
    },
    "data2vec-text": DECODER,
    # 5.0 takes the experts' width for the router's input
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "index_topk": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
    },
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "dots1": FULL_AND_SLIDING
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 4,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 28,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 12,
    },
    "electra": DECODER,
    "ernie": DECODER,
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma2": SLIDING_AND_FULL,
    "gemma3n_audio": {"sscp_conv_channel_size": [8, 8]},
    "gemma3n_text": {
        "layer_types": SLIDING_AND_FULL["layer_types"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gemma4_text": GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": GEMMA4,
    "glm_moe_dsa": {
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "got_ocr2_vision": {"output_channels": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "logits_mup_width_multiplier": 1.0},
    # older releases raise where their kernels are asked for and absent
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": FULL_AND_SLIDING | {"mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": [1], "floor_scale": 4},
    "longformer": {"attention_window": [4, 4]},
    "longcat_flash": {"zero_expert_num": 2},
    "luke": {"entity_vocab_size": 128, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "megatron-bert": DECODER,
    "mellum": FULL_AND_SLIDING | {"mlp_layer_types": ["dense", "sparse"]},
    "minicpm3": {"dim_model_base": 64},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": SLIDING_AND_FULL,
    "mllama_text_model": {
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "rope_scaling": {"rope_type": "default"},
    },
    "mistral4": {"head_dim": DERIVED},
    "mobilebert": {"embedding_size": 32},
    "modernbert-decoder": {"local_attention": 8},
    "musicgen": MUSICGEN,
    "musicgen_melody": MUSICGEN,
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 16,
        "chunk_size": -1,
        "num_blocks": 2,
    },
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "qwen2": QWEN_WINDOW,
    "qwen2_moe": QWEN_WINDOW | {"mlp_only_layers": [0]},
    "qwen3": QWEN_WINDOW,
    "qwen3_5_moe_text": M_ROPE,
    "qwen3_5_text": M_ROPE,
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": M_ROPE
    | {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "eos_token_id": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": DECODER
    | {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        # chunks of one token: rows of any length need no padding, with which upstream cannot take positions
        "local_attn_chunk_length": 1,
        "local_num_chunks_before": 3,
        "lsh_attn_chunk_length": 1,
        "lsh_num_chunks_before": 3,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "rembert": DECODER,
    "roberta": DECODER,
    "roberta-prelayernorm": DECODER,
    "roc_bert": DECODER
    | {"pronunciation_vocab_size": 128, "shape_vocab_size": 128, "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "roformer": DECODER,
    "rwkv": {"attention_hidden_size": 64},
    "smollm3": FULL_AND_SLIDING | {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [1, 0]},
    "transfo-xl": {"cutoffs": [32, 64], "d_embed": 64, "div_val": 1},
    "xlm": {"causal": True},
    "xlm-roberta": DECODER,
    "xlm-roberta-xl": DECODER,
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"autocast_kernel_dtype": "float32"},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": {
        "use_mamba_kernels": False,
        "num_hidden_layers": 4,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "layers_block_type": DERIVED,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    # one layer of each kind on both sides, and experts that some documents overflow
    "switch_transformers": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 3,
    },
    # 5.0 ties every shared block to the one of layer 0, and does not run without rotation
    "zamba2": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "adapter_rank": 8, "use_mem_rope": True},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 4,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}

# Sub-configurations that have to be given by type, because the class or an older release of it makes none by default.
PARTS: dict[str, dict[str, str]] = {
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
    "musicgen": {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"},
    "musicgen_melody": {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_melody_decoder"},
    "phi4_multimodal": {"vision_config": "phi4_multimodal_vision", "audio_config": "phi4_multimodal_audio"},
}

# Sub-configurations that need a package beside transformers: another type stands in, with these extra fields.
STAND_INS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "gemma3n": {"vision_config": ("siglip_vision_model", {"vocab_size": 8, "vocab_offset": 120, "rms_norm_eps": 1e-6})}
}

# Types that the causal mapping lists but that are no language models on their own.
NOT_ALONE = {
    "gemma4_assistant": "a drafter, which runs only on the states of a target model",
    "gemma4_unified_assistant": "a drafter, which runs only on the states of a target model",
}

# Types whose embeddings number the first token `padding_idx + 1`.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
