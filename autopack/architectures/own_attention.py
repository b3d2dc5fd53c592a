"""Decoders and encoders whose attention is code of their own: it runs on documents alone."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from autopack.family import Family, MixerCall, Tiny, Way
from autopack.mixers import ALONE, Alone

# Types whose position_ids say where a document begins.
_TYPES = "codegen falcon gpt_neo gpt_neox_japanese gptj megatron-bert openai-gpt rembert xglm"
_ATTENTION = """
CodeGenAttention FalconAttention GPTJAttention GPTNeoSelfAttention GPTNeoXJapaneseAttention MegatronBertSelfAttention
RemBertSelfAttention XGLMAttention
"""


def _refuse_alibi_of_falcon(config: Any) -> str | None:
    if config.model_type == "falcon" and config.alibi:
        return "it rounds biases by distance to bfloat16, counted from the start of the row, and adds them to the mask"
    return None


OWN_ATTENTION = Family(
    name="own_attention",
    model_types=frozenset(_TYPES.split()),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={
        **dict.fromkeys(_ATTENTION.split(), ALONE),
        "Attention": ALONE,  # OpenAI GPT's
    },
    refusal=_refuse_alibi_of_falcon,
    tiny=Tiny(
        configs={
            "falcon": {"new_decoder_architecture": True},
            "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
            "transfo-xl": {"cutoffs": [32, 64], "d_embed": 64, "div_val": 1},
        },
        causal={name: {"is_decoder": True} for name in ("megatron-bert", "rembert")},
    ),
)


class _Bloom(Alone):
    """Bloom's biases, (rows * heads, 1, columns), are made anew for whole rows, by the model's own function."""

    def of_whole_rows(self, mixer: nn.Module, name: str, value: torch.Tensor, rows: int, columns: int) -> Any:
        if name != "alibi":
            return None
        make: Any = vars(sys.modules[type(mixer).__module__])["build_alibi_tensor"]
        ones = torch.ones(rows, columns, dtype=torch.long, device=value.device)
        return make(ones, len(value) // rows, value.dtype)


# Their attention adds a bias by distance (ALiBi, arXiv 2108.12409).
ALIBI = Family(
    name="alibi",
    model_types=frozenset("bloom mpt".split()),
    how="the model's own attention, documents alone; biases restart",
    positions=False,
    attends=False,
    mixers={"BloomAttention": _Bloom(per_head=("alibi",)), "MptAttention": Alone(by_columns=True)},
)


def _refuse_block_sparse(config: Any) -> str | None:
    if getattr(config, "attention_type", None) == "block_sparse":
        return (
            "what its block-sparse attention gives a document depends on the calls before, since a short row makes it "
            "attend fully for good (BigBirdModel.forward: `self.set_attention_type('original_full')`); load it with "
            "attention_type='original_full'"
        )
    return None


# Which blocks its sparse attention sees, and whether it is sparse, depends on the row.
BIG_BIRD = Family(
    name="big_bird",
    model_types=frozenset({"big_bird"}),
    how="the model's own attention, documents alone",
    attends=False,
    mixers={"BigBirdSelfAttention": ALONE},
    refusal=_refuse_block_sparse,
    tiny=Tiny(configs={"big_bird": {"attention_type": "original_full"}}, causal={"big_bird": {"is_decoder": True}}),
)


class _TableOfLongest(Way):
    """The table of rotations of the longest document, however long the row: attention takes its beginning."""

    recurs = False
    counts = True
    words = "table of the longest document"
    work = "the table itself"

    def run(self, call: MixerCall) -> Any:
        shape = torch.Size((call.layout.rows, call.layout.max_seqlen))
        return call.changed(lambda name, value: shape if name == call.first else value)


# It rotates by columns.
ROFORMER = Family(
    name="roformer",
    model_types=frozenset({"roformer"}),
    how="the model's own attention, documents alone; rotations restart",
    positions=False,
    attends=False,
    mixers={
        "RoFormerSelfAttention": Alone(beginnings=(("sinusoidal_pos", 2),), by_columns=True),
        "RoFormerSinusoidalPositionalEmbedding": _TableOfLongest(),
    },
    tiny=Tiny(causal={"roformer": {"is_decoder": True}}),
)
