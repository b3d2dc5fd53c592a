"""Published configurations of encoders with decoders, as their config.json has them.

From memory of the published files.
"""

from __future__ import annotations

from compat.published.llamas import Configurations

_SUMMARIZE = {
    "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30, "no_repeat_ngram_size": 3,
    "num_beams": 4, "prefix": "summarize: ",
}  # fmt: skip
_TASKS = {
    "summarization": _SUMMARIZE,
    "translation_en_to_de": {
        "early_stopping": True, "max_length": 300, "num_beams": 4, "prefix": "translate English to German: ",
    },
    "translation_en_to_fr": {
        "early_stopping": True, "max_length": 300, "num_beams": 4, "prefix": "translate English to French: ",
    },
}  # fmt: skip
_T5 = {
    "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "decoder_start_token_id": 0, "dropout_rate": 0.1,
    "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
    "model_type": "t5", "n_positions": 512, "output_past": True, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "task_specific_params": _TASKS, "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
_BART_LIKE = {
    "activation_dropout": 0.0, "add_bias_logits": False, "attention_dropout": 0.0, "classif_dropout": 0.0,
    "init_std": 0.02, "is_encoder_decoder": True, "decoder_layerdrop": 0.0, "encoder_layerdrop": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
_12_LAYERS = {
    "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12,
    "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 12, "num_hidden_layers": 12,
}  # fmt: skip
_BART_TASKS = {
    "summarization": {"length_penalty": 1.0, "max_length": 128, "min_length": 12, "num_beams": 4},
    "summarization_cnn": {"length_penalty": 2.0, "max_length": 142, "min_length": 56, "num_beams": 4},
    "summarization_xsum": {"length_penalty": 1.0, "max_length": 62, "min_length": 11, "num_beams": 6},
}

ENCODER_DECODERS: Configurations = {
    "T5 base": ("T5ForConditionalGeneration", {
        **_T5, "d_ff": 3072, "d_model": 768, "num_heads": 12, "num_layers": 12,
    }),
    "Flan-T5 base": ("T5ForConditionalGeneration", {
        **_T5, "d_ff": 2048, "d_model": 768, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 12,
        "num_heads": 12, "num_layers": 12, "relative_attention_max_distance": 128, "tie_word_embeddings": False,
        "transformers_version": "4.23.1",
    }),
    "mT5 small": ("MT5ForConditionalGeneration", {
        "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "mt5",
        "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer",
        "vocab_size": 250112,
    }),
    "BART large": ("BartForConditionalGeneration", {
        **_BART_LIKE, **_12_LAYERS, "activation_function": "gelu", "add_final_layer_norm": False,
        "architectures": ["BartModel"], "attention_dropout": 0.1, "activation_dropout": 0.1, "classif_dropout": 0.1,
        "classifier_dropout": 0.0, "decoder_start_token_id": 2, "dropout": 0.1, "early_stopping": True,
        "forced_bos_token_id": 0, "forced_eos_token_id": 2, "gradient_checkpointing": False,
        "max_position_embeddings": 1024, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False,
        "num_beams": 4, "scale_embedding": False, "task_specific_params": _BART_TASKS,
        "transformers_version": "4.7.0.dev0", "use_cache": True, "vocab_size": 50265,
    }),
    "mBART large 50": ("MBartForConditionalGeneration", {
        **_BART_LIKE, **_12_LAYERS, "activation_function": "gelu", "add_final_layer_norm": True,
        "architectures": ["MBartForConditionalGeneration"], "classifier_dropout": 0.0, "decoder_start_token_id": 2,
        "dropout": 0.1, "early_stopping": True, "forced_eos_token_id": 2, "gradient_checkpointing": False,
        "max_length": 200, "max_position_embeddings": 1024, "model_type": "mbart", "normalize_before": True,
        "normalize_embedding": True, "num_beams": 5, "output_past": True, "scale_embedding": True,
        "static_position_embeddings": False, "tokenizer_class": "MBart50Tokenizer",
        "transformers_version": "4.4.0.dev0", "use_cache": True, "vocab_size": 250054,
    }),
    "Pegasus large": ("PegasusForConditionalGeneration", {
        **_BART_LIKE, "activation_dropout": 0.1, "activation_function": "relu", "add_final_layer_norm": True,
        "architectures": ["PegasusForConditionalGeneration"], "attention_dropout": 0.1, "d_model": 1024,
        "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 16, "decoder_start_token_id": 0,
        "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layers": 16,
        "eos_token_id": 1, "extra_pos_embeddings": 1, "force_bos_token_to_be_generated": False,
        "forced_eos_token_id": 1, "gradient_checkpointing": False, "length_penalty": 0.8, "max_length": 256,
        "max_position_embeddings": 1024, "model_type": "pegasus", "normalize_before": True,
        "normalize_embedding": False, "num_beams": 8, "num_hidden_layers": 16, "pad_token_id": 0,
        "scale_embedding": True, "static_position_embeddings": True,
        "task_specific_params": {
            "summarization_xsum": {"length_penalty": 0.8, "max_length": 64, "max_position_embeddings": 512},
        },
        "transformers_version": "4.11.0.dev0", "use_cache": True, "vocab_size": 96103,
    }),
    "Marian English to German": ("MarianMTModel", {
        **_BART_LIKE, "_num_labels": 3, "activation_function": "swish", "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"], "bad_words_ids": [[58100]], "d_model": 512,
        "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layers": 6, "decoder_start_token_id": 58100,
        "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "encoder_layers": 6, "eos_token_id": 0, "forced_eos_token_id": 0, "max_length": 512,
        "max_position_embeddings": 512, "model_type": "marian", "normalize_before": False,
        "normalize_embedding": False, "num_beams": 6, "num_hidden_layers": 6, "pad_token_id": 58100,
        "scale_embedding": True, "share_encoder_decoder_embeddings": True, "static_position_embeddings": True,
        "transformers_version": "4.22.0.dev0", "use_cache": True, "vocab_size": 58101,
    }),
}  # fmt: skip
