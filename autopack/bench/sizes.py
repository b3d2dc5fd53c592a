"""Sizes in which any type of model can be built, by name."""

from __future__ import annotations

from dataclasses import dataclass

TINY = "tiny"


@dataclass(frozen=True)
class Size:
    """Layers, widths, heads and vocabulary; in the proportions of released Llamas."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int = 32000

    def fields(self) -> dict[str, int]:
        """By the names that configurations have in common."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
        }


SIZES = {
    "small": Size(2, 128, 344, 4, 4, 4096),
    "7M": Size(4, 256, 688, 4, 4, 8192),
    "60M": Size(8, 512, 1376, 8, 8),
    "130M": Size(12, 768, 2048, 12, 12),
    "370M": Size(24, 1024, 2736, 16, 16),
    "1B": Size(16, 2048, 8192, 32, 8),
    "7B": Size(32, 4096, 11008, 32, 32),
}
"""What a Llama of that size has. Other types have more or fewer parameters: what a configuration calls otherwise, or
has beside these fields (experts, states of mixers), is as in `autopack.tiny`."""
NAMES = (TINY, *SIZES)
