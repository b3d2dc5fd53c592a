"""Published configurations of mixtures of experts and of models that recur, as their config.json has them.

From memory of the published files, unless a comment names another source.
"""

from __future__ import annotations

from compat.published.llamas import Configurations

_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_DEEPSEEK = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_MAMBA = {
    "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 0, "expand": 2,
    "fused_add_norm": True, "hidden_act": "silu", "initializer_range": 0.1, "layer_norm_epsilon": 1e-05,
    "model_type": "mamba", "pad_token_id": 0, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False,
    "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001,
    "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_scale": 1.0,
    "torch_dtype": "float32", "transformers_version": "4.39.0.dev0", "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip
_FIVE = [*["mamba"] * 5, "hybrid"]
_ZAMBA2_LAYERS = ["mamba", *_FIVE, *_FIVE[1:], *_FIVE * 11, *["mamba"] * 3]

MIXTURES: Configurations = {
    "Mixtral 8x7B": ("MixtralForCausalLM", {
        **_MIXTRAL, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_hidden_layers": 32, "router_aux_loss_coef": 0.02,
        "transformers_version": "4.36.0.dev0",
    }),
    "Mixtral 8x22B": ("MixtralForCausalLM", {
        **_MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 65536,
        "num_attention_heads": 48, "num_hidden_layers": 56, "router_aux_loss_coef": 0.001,
        "transformers_version": "4.38.0",
    }),
    "DeepSeek-V2-Lite": ("DeepseekV2ForCausalLM", {
        **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
        "topk_method": "greedy", "transformers_version": "4.33.1", "vocab_size": 102400,
    }),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {
        **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4, "topk_method": "noaux_tc",
        "transformers_version": "4.33.1", "vocab_size": 129280,
    }),
    "Jamba v0.1": ("JambaForCausalLM", {
        "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "bos_token_id": 1, "calc_logits_for_entire_prompt": False, "eos_token_id": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True,
        "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 262144, "num_attention_heads": 32,
        "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "use_mamba_kernels": True, "vocab_size": 65536,
    }),
    "Mamba 130M": ("MambaForCausalLM", {
        **_MAMBA, "d_inner": 1536, "d_model": 768, "hidden_size": 768, "intermediate_size": 1536, "n_layer": 24,
        "num_hidden_layers": 24, "time_step_rank": 48,
    }),
    # Of a public benchmark's copy of the file (NX-AI, mlstm benchmarks), as are the layers of Zamba2.
    "Codestral Mamba 7B": ("Mamba2ForCausalLM", {
        "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
        "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "mamba2",
        "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
        "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
        "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
        "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0",
        "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 32768,
    }),
    "RecurrentGemma 2B": ("RecurrentGemmaForCausalLM", {
        "architectures": ["RecurrentGemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"], "bos_token_id": 2,
        "conv1d_width": 4, "embeddings_scale_by_sqrt_dim": True, "eos_token_id": 1,
        "final_w_init_variance_scale": 0.07692307692307693, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560, "intermediate_size": 15360,
        "logits_soft_cap": 30.0, "lru_width": 2560, "model_type": "recurrent_gemma", "num_attention_heads": 10,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 256000, "w_init_variance_scale": 0.01,
    }),
    "Zamba2 7B": ("Zamba2ForCausalLM", {
        "add_bias_linear": False, "architectures": ["Zamba2ForCausalLM"], "attention_dropout": 0.0,
        "attention_head_dim": 224, "attention_hidden_size": 7168, "bos_token_id": 1, "chunk_size": 256,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "layers_block_type": _ZAMBA2_LAYERS, "mamba_d_conv": 4, "mamba_d_state": 64,
        "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 2, "max_position_embeddings": 4096,
        "model_type": "zamba2", "n_mamba_heads": 112, "num_attention_heads": 32, "num_hidden_layers": 81,
        "num_key_value_heads": 32, "num_logits_to_keep": 1, "num_mem_blocks": 2, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "rope_theta": 10000, "time_step_floor": 0.0001, "time_step_limit": None,
        "time_step_max": 0.1, "time_step_min": 0.001, "torch_dtype": "bfloat16",
        "transformers_version": "4.49.0.dev0", "use_cache": True, "use_conv_bias": True, "use_long_context": False,
        "use_mem_rope": True, "use_shared_attention_adapter": False, "use_shared_mlp_adapter": True,
        "adapter_rank": 128, "vocab_size": 32000,
    }),
    "LFM2 1.2B": ("Lfm2ForCausalLM", {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
        "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
        "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
        "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
        "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0,
        "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
        "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
    }),
}  # fmt: skip
