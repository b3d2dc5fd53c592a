"""Models in which nothing smaller than the whole can be kept within documents: each document is run alone."""

from typing import Any

from autopack.family import Family
from autopack.mixers import OneByOne

__all__ = ["FAMILY"]

_MODELS = {
    "its byte patches and n-gram embeddings run across documents": "BltForCausalLM BltModel",
    "its tokens, prompts and positions are numbered from the start of the row": "CpmAntForCausalLM CpmAntModel",
    "its key-value compressors pool windows counted from the row's start": "DeepseekV4ForCausalLM DeepseekV4Model",
    "its indexer selects blocks of keys counted from the row's start": "MiniMaxM3VLForCausalLM MiniMaxM3VLTextModel",
    "its streams of n-grams are numbered from the start of the row": "ProphetNetForCausalLM ProphetNetDecoder",
    "its hashes and chunks go over the row": "ReformerModelWithLMHead ReformerForMaskedLM ReformerModel",
    "its relative encodings and streams are made for the row": "XLNetLMHeadModel XLNetModel",
}

_TYPES = "blt cpmant deepseek_v4 minimax_m3_vl minimax_m3_vl_text prophetnet reformer xlnet"


def _refusal(config: Any) -> str | None:
    if config.model_type == "prophetnet" and config.is_encoder_decoder:
        return (
            "the streams of n-grams of its ProphetNetDecoder are numbered from the start of the row, and documents are "
            "run alone as a whole for models without an encoder only"
        )
    return None


FAMILY = Family(
    name="one_by_one",
    model_types=frozenset(
        {"blt", "cpmant", "deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text", "prophetnet", "reformer", "xlnet"}
    ),
    path="the whole model, documents of one length as a batch",
    attends=False,
    refusal=_refusal,
    mixers={name: OneByOne(reason) for reason, names in _MODELS.items() for name in names.split()},
)
