"""State-space layers (Mamba, Mamba-2), alone or beside attention.

Their convolution reaches into the document before, and the state of the scan goes on from it. Upstream restarts both
only in CUDA kernels that take `seq_idx`.
"""

from __future__ import annotations

from typing import Any

from autopack.family import DERIVED, Family, Tiny
from autopack.mixers import AtOperations, EqualRows

_TYPES = """
bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemo_speechlm nemotron_h nemotron_h_omni zamba zamba2
"""
_MAMBA = "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer"
_MAMBA_2 = "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer"

_SELECTIVE_SCAN = AtOperations(("causal_conv1d_fn", "mamba_selective_scan"), fused="mamba_inner_fn")
# Up to 4.57 the state that chunks hand on in torch counts what follows it in the row.
_DUALITY = AtOperations(
    ("causal_conv1d_fn", "mamba2_chunk_scan"), fused="mamba2_split_conv1d_scan_combined", before=EqualRows()
)

_TINY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    # older releases raise where their kernels are asked for and absent
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 64, "image_token_id": 120}
    | {"audio_token_id": 119, "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64}},
    "zamba": {"use_mamba_kernels": False, "num_hidden_layers": 4, "attn_layer_period": 1, "attn_layer_offset": 0}
    | {"layers_block_type": DERIVED, "attention_hidden_size": 128, "attention_head_dim": 32},
    # 5.0 ties every shared block to the one of layer 0, and does not run without rotation
    "zamba2": {"layers_block_type": ["hybrid", "mamba", "hybrid"], "adapter_rank": 8, "use_mem_rope": True},
}

FAMILY = Family(
    name="state_space",
    model_types=frozenset(_TYPES.split()),
    how="convolution and scan by documents; attention document by document",
    mixers=dict.fromkeys(_MAMBA.split(), _SELECTIVE_SCAN) | dict.fromkeys(_MAMBA_2.split(), _DUALITY),
    why_no_media={
        "nemotron_h_omni": "it takes frames in groups over the videos of a call, so a frame of one joins those of the "
        "next (get_video_features)"
    },
    media_types={"image": frozenset({"nemotron_h_omni"}), "sound": frozenset({"nemo_speechlm", "nemotron_h_omni"})},
    tiny=Tiny(configs=_TINY, images={"grid of one frame": frozenset({"nemotron_h_omni"})}),
)
