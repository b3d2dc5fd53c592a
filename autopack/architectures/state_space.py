"""State-space layers (Mamba, Mamba-2), alone or beside attention.

Their convolution reaches into the document before, and the state of the scan goes on from it. Upstream restarts both
only in CUDA kernels that take `seq_idx`.
"""

from autopack.family import Family
from autopack.mixers import AtOperations

__all__ = ["FAMILY"]

_SELECTIVE_SCAN = AtOperations(("causal_conv1d_fn", "mamba_selective_scan"), fused="mamba_inner_fn")
_STATE_SPACE_DUALITY = AtOperations(
    ("causal_conv1d_fn", "mamba2_chunk_scan"), fused="mamba2_split_conv1d_scan_combined"
)

FAMILY = Family(
    name="state_space",
    model_types=frozenset(
        {
            "bamba",
            "falcon_mamba",
            "mamba",
            "mamba2",
            "falcon_h1",
            "granitemoehybrid",
            "jamba",
            "nemotron_h",
            "zamba",
            "zamba2",
        }
    ),
    path="convolution and scan by documents; attention document by document",
    mixers=dict.fromkeys(["FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"], _SELECTIVE_SCAN)
    | dict.fromkeys(
        [
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "Mamba2Mixer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ],
        _STATE_SPACE_DUALITY,
    ),
)
