"""Which models are run through which kernels, small enough for an interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_DELTA = (
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_bwd_kernel_dqkwg",
    "causal_conv1d with seq_idx",
)
_KDA = ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "causal_conv1d with seq_idx")
_CHUNKS = (
    "_chunk_scan_fwd_kernel",
    "_chunk_scan_chunk_state_bwd_dx_kernel",
    "causal_conv1d with seq_idx",
)
_SCAN = ("selective_scan_fwd", "selective_scan_bwd", "causal_conv1d_fwd", "causal_conv1d_bwd")
_CONVOLUTION = ("causal_conv1d with seq_idx", "causal_conv1d_bwd")
_LIGER = ("_rms_norm_forward_kernel", "_triton_rope", "_swiglu_forward_kernel")
_FLASH = ("attn_fwd", "_bwd_preprocess")

ROWS: tuple[tuple[int, ...], ...] = ((21, 1, 6, 4), (19, 13))
"""Documents of every row, in tokens. With chunks of 16 some end inside of one, and one spans
two."""
LONG: tuple[tuple[int, ...], ...] = ((70, 1, 9), (41, 39))
"""The same for the kernels of fla, whose chunks have 64 tokens."""
SHORT = {ROWS: ((17, 1, 3),), LONG: ((65, 1, 3),)}
"""The least that has a document across chunks and one of a single token."""


@dataclass(frozen=True)
class Cell:
    """A type, how it is made small, and the kernels that have to run in its packed call."""

    kernels: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[int, ...], ...] = ROWS
    type: str = ""
    """Of the model, where it is not the name of the cell."""
    flash: bool = False
    """Attention by flash-attn."""
    liger: str = ""
    """Liger's kernels are applied "before" or "after" the model is enabled."""
    loss: bool = False
    """What is compared is the loss of all labels, which Liger's kernels compute without logits."""


_ONE_OF_EACH = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 1,
}
_TWO_HEADS = {"linear_num_value_heads": 2}
_SHARED_ONCE = {
    "num_hidden_layers": 2,
    "layers_block_type": ["linear_attention", "hybrid"],
    "hybrid_layer_ids": [1],
}


def _mamba(**config: Any) -> Cell:
    return Cell(_CHUNKS, config)


MIXERS = {
    "mamba": Cell(_SCAN),
    "falcon_mamba": Cell(_SCAN),
    "jamba": Cell(_SCAN),
    "zamba": Cell(_SCAN),
    "mamba2": _mamba(num_hidden_layers=1, num_heads=2, head_dim=64, chunk_size=16),
    "bamba": _mamba(mamba_n_heads=2, mamba_d_head=64, mamba_chunk_size=16),
    "falcon_h1": _mamba(num_hidden_layers=1, mamba_n_heads=2, mamba_d_head=64, mamba_chunk_size=16),
    "granitemoehybrid": _mamba(mamba_n_heads=2, mamba_d_head=64, mamba_chunk_size=16),
    "nemotron_h": _mamba(mamba_num_heads=2, mamba_head_dim=64, chunk_size=16),
    "zamba2": _mamba(n_mamba_heads=2, mamba_headdim=64, chunk_size=16, **_SHARED_ONCE),
    "qwen3_next": Cell(_DELTA, rows=LONG),
    "qwen3_5_text": Cell(_DELTA, _TWO_HEADS, rows=LONG),
    "qwen3_5_moe_text": Cell(_DELTA, rows=LONG),
    "qwen4_exp_text": Cell(_DELTA, rows=LONG),
    "olmo_hybrid": Cell(_DELTA, _TWO_HEADS, rows=LONG),
    "kimi_linear": Cell(_KDA, _ONE_OF_EACH, rows=LONG),
    "bailing_hybrid": Cell(_KDA, _ONE_OF_EACH, rows=LONG),
    "lfm2": Cell(_CONVOLUTION),
    "lfm2_moe": Cell(_CONVOLUTION),
    "inkling_text": Cell(_CONVOLUTION),
    "inkling2_text": Cell(_CONVOLUTION),
}
ATTENTION = {
    name: Cell(_FLASH, flash=True) for name in ("llama", "qwen2", "qwen3", "olmo2", "bert")
}
LIGER = {
    f"{name}, Liger applied {when}": Cell(_LIGER, {"num_hidden_layers": 1}, type=name, liger=when)
    for name in ("llama", "qwen3", "mistral")
    for when in ("before", "after")
}
LIGER |= {
    f"{name}, Liger's loss applied {when}": Cell(
        (*_LIGER, "liger_cross_entropy_kernel"),
        {"num_hidden_layers": 1},
        type=name,
        liger=when,
        loss=True,
    )
    for name, when in (("llama", "before"), ("qwen3", "after"))
}
CELLS = {**MIXERS, **ATTENTION, **LIGER}
