"""State-space layers (Mamba, Mamba-2), alone or beside attention.

Their convolution reaches into the document before, and the state of the scan goes on from it. Upstream restarts both
only in CUDA kernels that take `seq_idx`.
"""

from autopack.architectures import Family

__all__ = ["FAMILY"]

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
    path="state-space mixer on documents as rows; attention document by document",
    mixers=frozenset(
        {
            "BambaMixer",
            "FalconMambaMixer",
            "MambaMixer",
            "Mamba2Mixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "JambaMambaMixer",
            "NemotronHMamba2Mixer",
            "ZambaMambaMixer",
            "Zamba2MambaMixer",
        }
    ),
)
