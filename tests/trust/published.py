"""Configurations as their authors have published them, with fewer layers and narrower ones."""

from __future__ import annotations

from typing import Any

_NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 320}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_BERT = {
    "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "model_type": "bert", "num_attention_heads": 4, "pad_token_id": 0, "position_embedding_type": "absolute",
    "type_vocab_size": 2, "use_cache": True,
}  # fmt: skip
_FEW = {"do_sample": True, "max_length": 50}
_TASKS = {"summarization": {"early_stopping": True, "length_penalty": 2.0, "max_length": 200, "prefix": "summarize: "}}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("LlamaForCausalLM", {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "initializer_range": 0.02,
        "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, **_NARROW, **_HEADS,
    }),
    "Llama 2 7B": ("LlamaForCausalLM", {
        "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "max_position_embeddings": 4096, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "tie_word_embeddings": False, "use_cache": True, **_NARROW, "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }),
    "a reward model of Llama 3.1": ("LlamaForSequenceClassification", {
        "model_type": "llama", "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": 300,
        "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, **_NARROW, **_HEADS,
    }),
    "Qwen2.5 7B": ("Qwen2ForCausalLM", {
        "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "max_position_embeddings": 32768, "max_window_layers": 28, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, **_NARROW, **_HEADS,
    }),
    "Qwen3 8B": ("Qwen3ForCausalLM", {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 40960, "max_window_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, **_NARROW, **_HEADS,
    }),
    "Mistral 7B v0.1": ("MistralForCausalLM", {
        "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, **_NARROW, **_HEADS,
    }),
    "Mistral 7B v0.3": ("MistralForCausalLM", {
        "model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, **_NARROW, **_HEADS,
    }),
    "Mixtral 8x7B": ("MixtralForCausalLM", {
        "model_type": "mixtral", "max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, **_NARROW, **_HEADS,
    }),
    "Gemma 2 9B": ("Gemma2ForCausalLM", {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, **_NARROW, **_HEADS,
    }),
    "Gemma 3 1B": ("Gemma3ForCausalLM", {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, **_NARROW, **_HEADS, "num_hidden_layers": 7,
    }),
    "Phi-3 mini 128k": ("Phi3ForCausalLM", {
        "model_type": "phi3", "embd_pdrop": 0.0, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "pad_token_id": 300, "resid_pdrop": 0.0, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [1.5] * 8, "short_factor": [1.0] * 8, "type": "longrope"},
        "sliding_window": 262144, **_NARROW, "num_attention_heads": 4, "num_key_value_heads": 4,
    }),
    "GPT-2": ("GPT2LMHeadModel", {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256,
        "embd_pdrop": 0.1, "n_ctx": 1024, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": _FEW}, "vocab_size": 320,
    }),
    "BERT base": ("BertForMaskedLM", {**_BERT, **_NARROW}),
    "a classifier of BERT": ("BertForSequenceClassification", {
        **_BERT, **_NARROW, "problem_type": "single_label_classification",
        "id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2},
    }),
    "RoBERTa base": ("RobertaForMaskedLM", {
        **_BERT, **_NARROW, "model_type": "roberta", "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1,
    }),
    "ModernBERT base": ("ModernBertForMaskedLM", {
        "model_type": "modernbert", "attention_bias": False, "classifier_bias": False, "classifier_pooling": "mean",
        "cls_token_id": 281, "decoder_bias": True, "deterministic_flash_attn": False, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
        "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
        "mlp_bias": False, "norm_bias": False, "pad_token_id": 283, "position_embedding_type": "absolute",
        "reference_compile": None, "repad_logits_with_grad": False, "sparse_prediction": False,
        "sparse_pred_ignore_index": -100, **_NARROW, "num_attention_heads": 4,
    }),
    "T5 base": ("T5ForConditionalGeneration", {
        "model_type": "t5", "d_ff": 96, "d_kv": 16, "d_model": 64, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "n_positions": 512, "num_heads": 4, "num_layers": 4, "output_past": True, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "task_specific_params": _TASKS, "use_cache": True, "vocab_size": 320,
    }),
    "Flan-T5 base": ("T5ForConditionalGeneration", {
        "model_type": "t5", "d_ff": 96, "d_kv": 16, "d_model": 64, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "eos_token_id": 1, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "n_positions": 512,
        "num_decoder_layers": 4, "num_heads": 4, "num_layers": 4, "output_past": True, "pad_token_id": 0,
        "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "tie_word_embeddings": False,
        "vocab_size": 320,
    }),
}  # fmt: skip
