"""Published configurations of encoders, as their config.json has them. From memory of the published files."""

from __future__ import annotations

from typing import Any

from compat.published.llamas import Configurations

_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
_BERT: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "pad_token_id": 0,
    "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True,
}  # fmt: skip
_ROBERTA: dict[str, Any] = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1,
    "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
_DEBERTA: dict[str, Any] = {
    "model_type": "deberta-v2", "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "max_position_embeddings": 512, "relative_attention": True,
    "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "layer_norm_eps": 1e-7,
    "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip

ENCODERS: Configurations = {
    "BERT base uncased": ("BertForMaskedLM", {
        **_BERT, **_BASE, "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False,
        "transformers_version": "4.6.0.dev0", "vocab_size": 30522,
    }),
    "BERT large cased": ("BertForMaskedLM", {
        **_BERT, **_LARGE, "architectures": ["BertForMaskedLM"], "directionality": "bidi",
        "gradient_checkpointing": False, "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "transformers_version": "4.6.0.dev0", "vocab_size": 28996,
    }),
    "a classifier of BERT": ("BertForSequenceClassification", {
        **_BERT, **_BASE, "architectures": ["BertForSequenceClassification"], "classifier_dropout": None,
        "finetuning_task": "mnli", "gradient_checkpointing": False,
        "id2label": {"0": "contradiction", "1": "entailment", "2": "neutral"},
        "label2id": {"contradiction": 0, "entailment": 1, "neutral": 2},
        "problem_type": "single_label_classification", "torch_dtype": "float32", "transformers_version": "4.36.2",
        "vocab_size": 30522,
    }),
    "a classifier of BERT with five stars": ("BertForSequenceClassification", {
        **_BERT, **_BASE, "_num_labels": 5, "architectures": ["BertForSequenceClassification"],
        "directionality": "bidi", "finetuning_task": "sentiment-analysis",
        "id2label": {"0": "1 star", "1": "2 stars", "2": "3 stars", "3": "4 stars", "4": "5 stars"},
        "label2id": {"1 star": 0, "2 stars": 1, "3 stars": 2, "4 stars": 3, "5 stars": 4}, "output_past": True,
        "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "vocab_size": 105879,
    }),
    "E5 base v2": ("BertModel", {
        **_BERT, **_BASE, "architectures": ["BertModel"], "classifier_dropout": None, "torch_dtype": "float32",
        "transformers_version": "4.29.0.dev0", "vocab_size": 30522,
    }),
    "BGE base English v1.5": ("BertModel", {
        **_BERT, **_BASE, "architectures": ["BertModel"], "classifier_dropout": None, "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "torch_dtype": "float32",
        "transformers_version": "4.30.0", "vocab_size": 30522,
    }),
    "RoBERTa base": ("RobertaForMaskedLM", {**_ROBERTA, **_BASE}),
    "XLM-R base": ("XLMRobertaForMaskedLM", {
        **_ROBERTA, **_BASE, "architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta",
        "output_past": True, "position_embedding_type": "absolute", "transformers_version": "4.17.0.dev0",
        "use_cache": True, "vocab_size": 250002,
    }),
    "a reranker of XLM-R": ("XLMRobertaForSequenceClassification", {
        **_ROBERTA, **_BASE, "architectures": ["XLMRobertaForSequenceClassification"], "classifier_dropout": None,
        "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "model_type": "xlm-roberta", "output_past": True,
        "position_embedding_type": "absolute", "torch_dtype": "float32", "transformers_version": "4.30.0",
        "use_cache": True, "vocab_size": 250002,
    }),
    "DistilBERT base": ("DistilBertForMaskedLM", {
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
        "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
        "transformers_version": "4.10.0.dev0", "vocab_size": 30522,
    }),
    "a classifier of DistilBERT": ("DistilBertForSequenceClassification", {
        "activation": "gelu", "architectures": ["DistilBertForSequenceClassification"], "attention_dropout": 0.1,
        "dim": 768, "dropout": 0.1, "finetuning_task": "sst-2", "hidden_dim": 3072,
        "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "initializer_range": 0.02,
        "label2id": {"NEGATIVE": 0, "POSITIVE": 1}, "max_position_embeddings": 512, "model_type": "distilbert",
        "n_heads": 12, "n_layers": 6, "output_past": True, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
    }),
    "DeBERTa-v3 base": ("DebertaV2ForMaskedLM", {
        **_DEBERTA, **_BASE, "pad_token_id": 0, "pos_att_type": "p2c|c2p", "vocab_size": 128100,
    }),
    # As `save_pretrained` writes the file above, and as models that were trained from it are published.
    "a classifier of DeBERTa-v3": ("DebertaV2ForSequenceClassification", {
        **_DEBERTA, **_BASE, "architectures": ["DebertaV2ForSequenceClassification"],
        "id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"},
        "label2id": {"entailment": 0, "neutral": 1, "contradiction": 2}, "pad_token_id": 0, "pooler_dropout": 0,
        "pooler_hidden_act": "gelu", "pooler_hidden_size": 768, "pos_att_type": ["p2c", "c2p"],
        "torch_dtype": "float32", "transformers_version": "4.17.0", "vocab_size": 128100,
    }),
    "ELECTRA base discriminator": ("ElectraForPreTraining", {
        **_BERT, **_BASE, "architectures": ["ElectraForPreTraining"], "embedding_size": 768, "model_type": "electra",
        "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True,
        "vocab_size": 30522,
    }),
    "ELECTRA small generator": ("ElectraForMaskedLM", {
        **_BERT, "architectures": ["ElectraForMaskedLM"], "embedding_size": 128, "hidden_size": 256,
        "intermediate_size": 1024, "model_type": "electra", "num_attention_heads": 4, "num_hidden_layers": 12,
        "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True,
        "vocab_size": 30522,
    }),
    "ALBERT base v2": ("AlbertForMaskedLM", {
        "architectures": ["AlbertForMaskedLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 2,
        "classifier_dropout_prob": 0.1, "down_scale_factor": 1, "embedding_size": 128, "eos_token_id": 3,
        "gap_size": 0, "hidden_act": "gelu_new", "hidden_dropout_prob": 0, "initializer_range": 0.02,
        "inner_group_num": 1, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "albert",
        "net_structure_type": 0, "num_hidden_groups": 1, "num_memory_blocks": 0, "pad_token_id": 0,
        "type_vocab_size": 2, "vocab_size": 30000, **_BASE,
    }),
    "MPNet base": ("MPNetForMaskedLM", {
        "architectures": ["MPNetForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "mpnet", "pad_token_id": 1,
        "relative_attention_num_buckets": 32, "vocab_size": 30527, **_BASE,
    }),
    "ModernBERT base": ("ModernBertForMaskedLM", {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
        "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "reference_compile": None,
        "repad_logits_with_grad": False, "sep_token_id": 50282, "sparse_pred_ignore_index": -100,
        "sparse_prediction": False, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0",
        "vocab_size": 50368,
    }),
    "Longformer base 4096": ("LongformerForMaskedLM", {
        **_BASE, "architectures": ["LongformerForMaskedLM"], "attention_mode": "longformer",
        "attention_probs_dropout_prob": 0.1, "attention_window": [512] * 12, "bos_token_id": 0, "eos_token_id": 2,
        "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "ignore_attention_mask": False, "initializer_range": 0.02, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4098, "model_type": "longformer", "pad_token_id": 1, "sep_token_id": 2,
        "type_vocab_size": 1, "vocab_size": 50265,
    }),
}  # fmt: skip
