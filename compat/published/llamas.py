"""Published configurations of Llama and of models that are built like it, as their config.json has them.

From memory of the published files, unless a comment names another source.
"""

from __future__ import annotations

from typing import Any

Configurations = dict[str, tuple[str, dict[str, Any]]]
"""By name: the class that the file's `architectures` or the use of the model names, and all fields of the file."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "rms_norm_eps": 1e-05, "use_cache": True,
}  # fmt: skip
_LLAMA2 = {
    **_LLAMA, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096, "pretraining_tp": 1,
    "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "vocab_size": 32000,
}  # fmt: skip
_LLAMA3 = {
    **_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
_LLAMA31: dict[str, Any] = {
    **_LLAMA3, "max_position_embeddings": 131072, "mlp_bias": False, "transformers_version": "4.43.0.dev0",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
_QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip

LLAMAS: Configurations = {
    "Llama 2 7B": ("LlamaForCausalLM", {
        **_LLAMA2, "_name_or_path": "meta-llama/Llama-2-7b-hf", "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    }),
    "Llama 2 70B": ("LlamaForCausalLM", {**_LLAMA2, **_70B, "num_key_value_heads": 8}),
    "Llama 3 8B": ("LlamaForCausalLM", {
        **_LLAMA3, **_8B, "max_position_embeddings": 8192, "rope_scaling": None,
        "transformers_version": "4.40.0.dev0",
    }),
    "Llama 3.1 8B": ("LlamaForCausalLM", {**_LLAMA31, **_8B}),
    "Llama 3.1 8B Instruct": ("LlamaForCausalLM", {
        **_LLAMA31, **_8B, "eos_token_id": [128001, 128008, 128009], "transformers_version": "4.42.3",
    }),
    "Llama 3.1 70B": ("LlamaForCausalLM", {**_LLAMA31, **_70B}),
    "Llama 3.1 405B": ("LlamaForCausalLM", {**_LLAMA31, **_405B}),
    "Llama 3.2 1B": ("LlamaForCausalLM", {
        **_LLAMA31, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 16, "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0},
        "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0",
    }),
    "a reward model of Llama 3.1": ("LlamaForSequenceClassification", {
        **_LLAMA31, **_8B, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 128009,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "transformers_version": "4.46.2",
    }),
    "TinyLlama 1.1B": ("LlamaForCausalLM", {
        **_LLAMA, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.35.0", "vocab_size": 32000,
    }),
    "SmolLM2 135M": ("LlamaForCausalLM", {
        **_LLAMA, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "vocab_size": 49152,
    }),
    "Qwen1.5 7B": ("Qwen2ForCausalLM", {
        **_QWEN2, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768,
        "max_window_layers": 28, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "sliding_window": 32768, "tie_word_embeddings": False, "transformers_version": "4.37.0",
        "vocab_size": 151936,
    }),
    "Qwen2.5 0.5B": ("Qwen2ForCausalLM", {
        **_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "sliding_window": 32768, "tie_word_embeddings": True, "transformers_version": "4.40.1",
        "use_mrope": False, "vocab_size": 151936,
    }),
    "Qwen2.5 7B": ("Qwen2ForCausalLM", {
        **_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "sliding_window": 131072, "tie_word_embeddings": False, "transformers_version": "4.40.1",
        "use_mrope": False, "vocab_size": 152064,
    }),
    "Qwen2.5 72B Instruct": ("Qwen2ForCausalLM", {
        **_QWEN2, "eos_token_id": 151645, "hidden_size": 8192, "intermediate_size": 29568,
        "max_position_embeddings": 32768, "max_window_layers": 70, "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "sliding_window": 131072, "tie_word_embeddings": False,
        "transformers_version": "4.43.1", "vocab_size": 152064,
    }),
    "Qwen3 0.6B": ("Qwen3ForCausalLM", {
        **_QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
        "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rope_theta": 1000000, "tie_word_embeddings": True,
    }),
    "Qwen3 8B": ("Qwen3ForCausalLM", {
        **_QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_theta": 1000000, "tie_word_embeddings": False,
    }),
    "Qwen3 30B-A3B": ("Qwen3MoeForCausalLM", {
        **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
    }),
    "Mistral 7B v0.1": ("MistralForCausalLM", {
        **_MISTRAL, **_8B, "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
        "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
    }),
    "Mistral 7B v0.3": ("MistralForCausalLM", {
        **_MISTRAL, **_8B, "attention_dropout": 0.0, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "sliding_window": None, "transformers_version": "4.42.0.dev0", "vocab_size": 32768,
    }),
    "Mistral Nemo 12B": ("MistralForCausalLM", {
        **_MISTRAL, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.43.0.dev0",
        "vocab_size": 131072,
    }),
    # Of a public benchmark's copy of the file (NX-AI, mlstm benchmarks).
    "Ministral 8B": ("MistralForCausalLM", {
        **_MISTRAL, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 36,
        "rope_theta": 100000000.0, "sliding_window": 32768, "transformers_version": "4.46.0.dev0",
        "vocab_size": 131072,
    }),
    "StarCoder2 3B": ("Starcoder2ForCausalLM", {
        "architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu", "attention_dropout": 0.1,
        "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
        "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
        "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
        "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
        "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0",
        "use_bias": True, "use_cache": True, "vocab_size": 49152,
    }),
    "StableLM 2 1.6B": ("StableLmForCausalLM", {
        "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 4096, "model_type": "stablelm", "layer_norm_eps": 1e-05,
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
        "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.38.0", "use_cache": True, "use_qkv_bias": True, "vocab_size": 100352,
    }),
    "OLMo 1B": ("OlmoForCausalLM", {
        "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "olmo", "num_attention_heads": 16,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1, "pretraining_tp": 1,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 50304,
    }),
    "OLMo 2 7B": ("Olmo2ForCausalLM", {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True, "vocab_size": 100352,
    }),
    "Granite 3.0 2B": ("GraniteForCausalLM", {
        "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
        "logits_scaling": 8.0, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "granite",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "float32", "transformers_version": "4.46.0.dev0",
        "use_cache": True, "vocab_size": 49155,
    }),
    "Command-R 35B": ("CohereForCausalLM", {
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192,
        "initializer_range": 0.02, "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
        "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere",
        "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "pad_token_id": 0,
        "pretraining_tp": 1, "rope_theta": 8000000.0, "torch_dtype": "float16",
        "transformers_version": "4.38.2", "use_cache": True, "vocab_size": 256000,
    }),
}  # fmt: skip
