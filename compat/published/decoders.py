"""Published configurations of other decoders, as their config.json has them.

From memory of the published files, unless a comment names another source.
"""

from __future__ import annotations

from typing import Any

from compat.published.llamas import Configurations

_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 8192,
    "model_type": "gemma2", "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
_PHI = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None, "embd_pdrop": 0.0,
    "eos_token_id": None, "hidden_act": "gelu_new", "initializer_range": 0.02, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32, "num_key_value_heads": None,
    "qk_layernorm": False, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True,
    "vocab_size": 32064,
}  # fmt: skip
# Of the tests of diffusers (tests/pipelines/omnigen), where the file of Phi-3 with 128k stands; here with two decimals.
_LONG = [
    1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58, 15.66,
    15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77, 59.92,
    61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81,
]  # fmt: skip
_SHORT = [
    1.05, 1.05, 1.05, 1.1, 1.1, 1.1, 1.25, 1.25, 1.4, 1.45, 1.55, 1.85, 1.9, *[2.0] * 19, 2.1, 2.1, 2.2, 2.35, 2.35,
    2.35, 2.35, 2.4, 2.4, 2.65, 2.7, 2.9, 2.95, 3.05, 3.05, 3.05,
]  # fmt: skip
_PHI4_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
_NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.02,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox", "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
}  # fmt: skip
_OPT = {
    "_remove_final_layer_norm": False, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0, "bos_token_id": 2, "dropout": 0.1, "eos_token_id": 2, "init_std": 0.02,
    "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "pad_token_id": 1, "prefix": "</s>",
    "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 50272,
}  # fmt: skip
_BLOOM = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True, "model_type": "bloom", "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1,
    "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
    "transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True, "vocab_size": 250880,
}  # fmt: skip
_FALCON = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
    "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "parallel_attn": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip

DECODERS: Configurations = {
    "Gemma 2B": ("GemmaForCausalLM", {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
        "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
    }),
    "Gemma 2 2B": ("Gemma2ForCausalLM", {
        **_GEMMA2, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4,
    }),
    "Gemma 2 9B": ("Gemma2ForCausalLM", {
        **_GEMMA2, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window_size": 4096,
    }),
    "Gemma 2 27B": ("Gemma2ForCausalLM", {
        **_GEMMA2, "_attn_implementation": "eager", "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864,
        "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
    }),
    "Gemma 3 1B": ("Gemma3ForCausalLM", {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    }),
    "Phi-1.5": ("PhiForCausalLM", {
        **_PHI, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "partial_rotary_factor": 0.5, "resid_pdrop": 0.0,
    }),
    "Phi-2": ("PhiForCausalLM", {
        **_PHI, "bos_token_id": 50256, "eos_token_id": 50256, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "resid_pdrop": 0.1,
    }),
    "Phi-3 mini 4k": ("Phi3ForCausalLM", {
        **_PHI3, "max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047,
    }),
    "Phi-3 mini 128k": ("Phi3ForCausalLM", {
        **_PHI3, "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
    }),
    "Phi-4 mini": ("Phi3ForCausalLM", {
        **_PHI3, "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_key_value_heads": 8, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": _PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
        "sliding_window": 262144, "tie_word_embeddings": True, "transformers_version": "4.45.0",
        "vocab_size": 200064,
    }),
    "GPT-2": ("GPT2LMHeadModel", {**_GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12}),
    "GPT-2 XL": ("GPT2LMHeadModel", {
        **_GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True,
    }),
    "GPT-Neo 1.3B": ("GPTNeoForCausalLM", {
        "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
        "attention_layers": ["global", "local"] * 12, "attention_types": [[["global", "local"], 12]],
        "bos_token_id": 50256, "embed_dropout": 0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24,
        "resid_dropout": 0, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 0.9}},
        "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.9.0.dev0", "use_cache": True,
        "vocab_size": 50257, "window_size": 256,
    }),
    "GPT-J 6B": ("GPTJForCausalLM", {
        "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
        "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
        "n_inner": None, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64,
        "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}},
        "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
        "use_cache": True, "vocab_size": 50400,
    }),
    "GPT-NeoX 20B": ("GPTNeoXForCausalLM", {
        **_NEOX, "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0,
        "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64, "num_hidden_layers": 44,
        "transformers_version": "4.19.0.dev0", "vocab_size": 50432,
    }),
    "Pythia 1.4B": ("GPTNeoXForCausalLM", {
        **_NEOX, "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 24, "transformers_version": "4.24.0", "use_parallel_residual": True, "vocab_size": 50304,
    }),
    "OPT 125M": ("OPTForCausalLM", {
        **_OPT, "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768, "num_attention_heads": 12,
        "num_hidden_layers": 12, "word_embed_proj_dim": 768,
    }),
    "OPT 350M": ("OPTForCausalLM", {
        **_OPT, "do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16,
        "num_hidden_layers": 24, "word_embed_proj_dim": 512,
    }),
    "OPT 6.7B": ("OPTForCausalLM", {
        **_OPT, "do_layer_norm_before": True, "ffn_dim": 16384, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "word_embed_proj_dim": 4096,
    }),
    "BLOOM 560M": ("BloomForCausalLM", {**_BLOOM, "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}),
    "BLOOM 7B1": ("BloomForCausalLM", {
        **_BLOOM, "hidden_size": 4096, "n_layer": 30, "n_inner": None, "n_head": 32, "torch_dtype": "float16",
        "transformers_version": "4.21.0",
    }),
    "Falcon 7B": ("FalconForCausalLM", {
        **_FALCON, "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32,
    }),
    "Falcon 40B": ("FalconForCausalLM", {
        **_FALCON, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
        "num_hidden_layers": 60, "num_kv_heads": 8,
    }),
    "MPT 7B": ("MptForCausalLM", {
        "architectures": ["MPTForCausalLM"], "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None,
        },
        "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_", "fan_mode": "fan_in", "verbose": 0},
        "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048,
        "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
        "transformers_version": "4.28.1", "use_cache": False, "verbose": 0, "vocab_size": 50432,
    }),
}  # fmt: skip
