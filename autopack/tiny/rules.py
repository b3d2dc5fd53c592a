"""What tiny means, as data: the values that shrink a configuration, by field name and by model type."""

from __future__ import annotations

from typing import Any

VOCAB = 128
# The token ids below and above are left to padding, separators and placeholders.
ORDINARY = range(8, 100)
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
LAYERS = 2
POSITIONS = 512
WINDOW = 4
CHUNK = 8
EXPERTS = 4
TOP_K = 2

# Fields that mean the same in every configuration that has them.
FIELDS: dict[str, Any] = {
    # vocabularies
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "decoder_vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    # widths
    "hidden_size": HIDDEN,
    "d_model": HIDDEN,
    "n_embd": HIDDEN,
    "emb_dim": HIDDEN,
    "embedding_dim": HIDDEN,
    "embedding_size": HIDDEN,
    "word_embed_proj_dim": HIDDEN,
    "input_embedding_size": HIDDEN,
    "output_embedding_size": HIDDEN,
    "attention_hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "n_inner": 96,
    "dff": 96,
    "d_inner": 96,
    "dim_ff": 96,
    "feed_forward_size": 96,
    "mlp_dim": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    # depth
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_blocks": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_encoder_layers": LAYERS,
    "depth": LAYERS,
    # heads
    "num_attention_heads": HEADS,
    "attention_heads": HEADS,
    "num_heads": HEADS,
    "n_head": HEADS,
    "n_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS,
    "num_decoder_attention_heads": HEADS,
    "num_encoder_attention_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "swa_num_key_value_heads": KV_HEADS,
    "num_kv_heads": KV_HEADS,
    "kv_n_heads": KV_HEADS,
    "num_query_groups": KV_HEADS,
    "head_dim": HEAD_DIM,
    "swa_head_dim": HEAD_DIM,
    "attention_head_size": HEAD_DIM,
    "kv_channels": HEAD_DIM,
    "d_head": HEAD_DIM,
    "dim_head": HEAD_DIM,
    "rotary_dim": 8,
    "query_pre_attn_scalar": HEAD_DIM,
    # latent attention: value heads narrower than query and key heads
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # indexed attention: fewer keys than a document has tokens; with few heads, their scores would often tie at zero
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 4,
    # windows and positions
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention_window_len": WINDOW,
    "attention_chunk_size": CHUNK,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "global_attn_every_n_layers": 2,
    "full_attention_interval": 2,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "n_ctx": POSITIONS,
    "max_seq_len": POSITIONS,
    "max_target_positions": POSITIONS,
    "max_source_positions": POSITIONS,
    "context_length": POSITIONS,
    "model_max_length": POSITIONS,
    # experts
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_top_k": TOP_K,
    "moe_k": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    # recurrent mixers and short convolutions
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": CHUNK,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "n_groups": 1,
    "chunk_size": CHUNK,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "lru_width": HIDDEN,
    # vision and audio towers
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": HIDDEN,
    "num_mel_bins": 16,
}

# Fields that are shrunk only where the type's own default switches them on.
ONLY_IF_SET = {
    "sliding_window",
    "n_inner",
    "num_experts",
    "hidden_size_per_layer_input",
    "shared_intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_shared_experts",
    "moe_num_shared_experts",
    "n_shared_experts",
    "q_lora_rank",
    "query_pre_attn_scalar",
    "unpadded_vocab_size",
    "num_local_experts",
}

# Lists with one entry per layer. A type's own default is cut down to one layer of each kind.
PER_LAYER = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "no_rope_layers",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "layer_rope_theta",
    "attn_type_list",
)

# The names of the number of layers, as configurations store it.
DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers")
