"""Rules of tiny models, as data: the values that shrink a configuration, by field name."""

from __future__ import annotations

from typing import Any

VOCAB = 128
# The token ids below and above are left to padding, separators and placeholders.
ORDINARY = range(8, 100)
HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
LAYERS = 2
POSITIONS = 512

_WINDOWS = (
    "sliding_window sliding_window_size attention_window attention_window_size window_size "
    "local_attention_window_len"
)
_CHUNKS = "attention_chunk_size mamba_chunk_size chunk_size"
SPANS = f"{_WINDOWS} {_CHUNKS}".split()
"""Fields that count tokens of a document, or of a part of it."""

# Fields that mean the same in every configuration that has them, behind the value that they get.
_VALUES = f"""
# vocabularies
{VOCAB} vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size
# widths
{HIDDEN} hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim
{HIDDEN} input_embedding_size
{HIDDEN} output_embedding_size attention_hidden_size
16 hidden_size_per_layer_input
96 intermediate_size intermediate_size_mlp dense_intermediate_size ffn_hidden_size ffn_dim
96 decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff d_inner dim_ff feed_forward_size mlp_dim
32 moe_intermediate_size expert_ffn_hidden_size
32 shared_expert_intermediate_size shared_experts_intermediate_size
32 moe_shared_expert_intermediate_size shared_intermediate_size
# depth
{LAYERS} num_hidden_layers num_layers n_layer n_layers num_blocks
{LAYERS} decoder_layers encoder_layers num_decoder_layers
{LAYERS} num_encoder_layers depth
# heads
{HEADS} num_attention_heads attention_heads num_heads n_head n_heads
{HEADS} decoder_attention_heads encoder_attention_heads
{HEADS} num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
2 num_key_value_heads swa_num_key_value_heads num_kv_heads kv_n_heads num_query_groups
{HEAD_DIM} head_dim swa_head_dim attention_head_size kv_channels d_head dim_head d_kv
{HEAD_DIM} query_pre_attn_scalar
8 rotary_dim
# latent attention: value heads narrower than query and key heads
24 q_lora_rank
20 kv_lora_rank
8 qk_nope_head_dim qk_rope_head_dim
12 v_head_dim
# indexed attention: fewer keys than a document has tokens;
# with few heads, their scores would often tie at zero
16 index_head_dim index_n_heads
4 index_topk
# windows and positions
4 {_WINDOWS}
8 {_CHUNKS}
2 sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers full_attention_interval
{POSITIONS} max_position_embeddings n_positions n_ctx max_seq_len max_target_positions
{POSITIONS} max_source_positions context_length model_max_length
# experts
4 num_experts n_routed_experts num_local_experts moe_num_experts
2 num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k
1 n_group topk_group num_expert_group num_shared_experts n_shared_experts moe_num_shared_experts
1 first_k_dense_replace num_dense_layers moe_layer_start_index
# recurrent mixers and short convolutions
8 mamba_n_heads mamba_d_state mamba_num_heads ssm_state_size state_size mamba_dt_rank time_step_rank
16 mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
1 mamba_n_groups n_groups
2 mamba_expand linear_num_key_heads
4 linear_num_value_heads linear_num_heads
{HIDDEN} lru_width
# vision and audio towers
32 image_size
8 patch_size
{HIDDEN} out_hidden_size
16 num_mel_bins
"""
_LINES = (line.split() for line in _VALUES.strip().splitlines() if not line.startswith("#"))
FIELDS: dict[str, Any] = {name: int(value) for value, *names in _LINES for name in names}

# Fields that are shrunk only where the type's own default switches them on.
ONLY_IF_SET = """
sliding_window n_inner num_experts hidden_size_per_layer_input shared_intermediate_size
moe_intermediate_size shared_expert_intermediate_size num_shared_experts moe_num_shared_experts
n_shared_experts q_lora_rank query_pre_attn_scalar unpadded_vocab_size num_local_experts
""".split()

# Lists with one entry per layer. A type's own default is cut down to one layer of each kind.
PER_LAYER = """
layer_types layers_block_type mlp_layer_types indexer_types no_rope_layers
num_attention_heads_per_layer activation_sparsity_pattern layer_rope_theta attn_type_list
""".split()

ENDS = {"bos_token_id": 1} | dict.fromkeys(
    "eos_token_id decoder_start_token_id forced_eos_token_id".split(), 2
)
"""Token ids of beginnings and ends."""

# The names of the number of layers, as configurations store it.
DEPTH = "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers".split()
