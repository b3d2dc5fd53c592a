"""Encoder-decoders and similar decoders, by family: everything in them beside attention that
depends on the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autopack.architectures.own_attention import why_not_block_sparse
from autopack.family import Family, MixerCall, Way
from autopack.layout.token_map import Batches, each_by_itself
from autopack.mixers import ALONE, RELATIVE, RESTARTING, ROWS, EncoderOneByOne, OneByOne

# Of the BART kind: they number tokens by columns and take no position_ids. Their embeddings of
# positions give every document those of the first columns; most have attention through the
# interface, the others are run on documents alone.
_NUMBERING_COLUMNS = """
bart bigbird_pegasus blenderbot blenderbot-small florence2 m2m_100 marian mbart musicgen_decoder
musicgen_melody_decoder mvp pegasus plbart seamless_m4t seamless_m4t_v2 speech_to_text trocr
"""
_BY_COLUMNS = """
BartLearnedPositionalEmbedding BigBirdPegasusLearnedPositionalEmbedding
BlenderbotLearnedPositionalEmbedding BlenderbotSmallLearnedPositionalEmbedding
MBartLearnedPositionalEmbedding MvpLearnedPositionalEmbedding PLBartLearnedPositionalEmbedding
TrOCRLearnedPositionalEmbedding MarianSinusoidalPositionalEmbedding
MusicgenSinusoidalPositionalEmbedding MusicgenMelodySinusoidalPositionalEmbedding
PegasusSinusoidalPositionalEmbedding
"""
_BY_TOKENS = """
M2M100SinusoidalPositionalEmbedding SeamlessM4TSinusoidalPositionalEmbedding
SeamlessM4Tv2SinusoidalPositionalEmbedding Speech2TextSinusoidalPositionalEmbedding
TrOCRSinusoidalPositionalEmbedding
"""
"""Embeddings that number the tokens that are no padding."""

COLUMN_POSITIONS = Family.of(
    "column_positions",
    _NUMBERING_COLUMNS,
    "positions restarted; attention document by document",
    positions=False,
    media_types={"sound": "speech_to_text"},
    refusal=lambda config: (
        why_not_block_sparse(config, "encoder", "BigBirdPegasusEncoder")
        if config.is_encoder_decoder
        else None
    ),
    mixers={
        _BY_COLUMNS: RESTARTING,
        _BY_TOKENS: ROWS,
        "BigBirdPegasusSelfAttention MvpAttention TrOCRAttention": ALONE,
    },
)

# T5 and its kin make relative distances a bias of attention, which has neither positions nor a
# scale. In a packed row it would be one of the row: dense, and counted from its beginning. Switch
# Transformers lets an expert take so many tokens of a row and drops the rest, so its experts are
# run on documents as rows.

T5 = Family.of(
    "t5",
    "mt5 pop2piano switch_transformers t5 umt5",
    "bias of the longest document; attention document by document, across halves too",
    positions=False,
    mixers={
        "MT5Attention Pop2PianoAttention SwitchTransformersAttention T5Attention": RELATIVE,
        "SwitchTransformersSparseMLP": ROWS,
        "UMT5Attention": ALONE,  # every layer makes its own, inside
    },
)


class _RoutingAlone(Way):
    """Strategy that runs a router on each document: (tokens, channels) to a tuple of tensors.

    Each expert takes a limited number of tokens of a call, and tokens beyond it are dropped. The
    router computes the limit from all tokens that it gets. Experts look at one token at a time.
    """

    reads_padding = True
    recurs = False

    def run(self, call: MixerCall) -> Any:
        found = Batches.grouped(call.layout, each_by_itself)
        rows = call.arguments[call.first].unflatten(0, call.layout.shape)
        router: Any = call.mixer
        capacity, outputs = router.expert_capacity, []
        for batch in found.maps:
            try:
                # No mask: it says where padding lies, and documents have none.
                outputs.append(call.original(router, batch.gather(rows)[0]))
            finally:
                # In evaluation it keeps the capacity of its last call, which would become its
                # capacity in training from then on.
                router.expert_capacity = capacity
        routed = found.together([tuple(part[None] for part in output) for output in outputs])
        return tuple(part.flatten(0, 1) for part in routed)


NLLB_MOE = Family.of(
    "nllb_moe",
    "nllb-moe",
    "positions restarted; attention document by document; routers on one document after another",
    positions=False,
    refusal=lambda config: (
        f"with second_expert_policy={config.second_expert_policy!r} NllbMoeTop2Router draws second "
        "experts anew at every call, in evaluation too, so no document has one result of its own"
        if config.second_expert_policy in ("random", "sampling")
        else None
    ),
    mixers={"NllbMoeSinusoidalPositionalEmbedding": ROWS, "NllbMoeTop2Router": _RoutingAlone()},
)

# Blocks of the row reach everywhere in it, or the decoder's tokens and the encoder's states share a
# softmax.
WHOLE_HALF = Family.of(
    "whole_half",
    "led longt5 pegasus_x t5gemma2",
    "one half as a whole, documents of like lengths as a batch; attention document by document in "
    "the other",
    positions=False,
    mixers={
        "LEDEncoder": EncoderOneByOne(
            "its encoder pads the row to a multiple of its window and attends by blocks"
        ),
        "LongT5Stack": EncoderOneByOne(
            "its encoder attends by blocks of the row and hands on their padded bias"
        ),
        "PegasusXEncoder": EncoderOneByOne(
            "its encoder attends by blocks of the row and through global tokens"
        ),
        "LEDLearnedPositionalEmbedding PegasusXSinusoidalPositionalEmbedding": RESTARTING,
        "LongT5Attention": RELATIVE,
        "T5Gemma2Decoder": OneByOne(
            "its decoder attends to its own tokens and to the encoder's states in one softmax"
        ),
    },
)

_TOKENS_FIRST = "its attention has tokens before the batch"


class _FsmtDecoder(OneByOne):
    """Strategy for FSMT's decoder: documents run with their part of a mask (columns, columns).

    Given labels and no tokens for its decoder, its model takes the encoder's tokens.
    """

    reads_encoder_tokens = True
    masks_without_cache = True

    def run(self, call: MixerCall) -> Any:
        def original(decoder: nn.Module, **given: Any) -> Any:
            tokens = (
                given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
            )
            mask, length = given.get("decoder_causal_mask"), tokens.shape[1]
            given["decoder_causal_mask"] = None if mask is None else mask[:length, :length]
            return call.original(decoder, **given)

        return super().run(replace(call, original=original))


# Its halves are no models, only modules.
FSMT = Family.of(
    "fsmt",
    "fsmt",
    "each half as a whole, documents of like lengths as a batch",
    positions=False,
    mixers={"FSMTEncoder": OneByOne(_TOKENS_FIRST), "FSMTDecoder": _FsmtDecoder(_TOKENS_FIRST)},
)
