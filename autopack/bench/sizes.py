"""Sizes in which any type of model can be built, by name."""

from __future__ import annotations

TINY = "tiny"


def _size(layers: int, hidden: int, inner: int, heads: int, key_heads: int, vocabulary: int = 32000) -> dict[str, int]:
    """In the proportions of released Llamas, by the names that configurations have in common."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
    }


SIZES = {
    "small": _size(2, 128, 344, 4, 4, 4096),
    "7M": _size(4, 256, 688, 4, 4, 8192),
    "60M": _size(8, 512, 1376, 8, 8),
    "130M": _size(12, 768, 2048, 12, 12),
    "370M": _size(24, 1024, 2736, 16, 16),
    "1B": _size(16, 2048, 8192, 32, 8),
    "7B": _size(32, 4096, 11008, 32, 32),
}
"""What a Llama of that size has. Other types have more or fewer parameters: what a configuration calls otherwise, or
has beside these fields (experts, states of mixers), is as in `autopack.tiny`."""
NAMES = (TINY, *SIZES)
