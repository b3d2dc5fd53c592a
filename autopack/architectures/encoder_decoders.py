"""Encoder-decoders and similar decoders, by family: everything in them beside attention that
depends on the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopack.architectures.own_attention import why_not_block_sparse
from autopack.family import Family, MixerCall, Tiny, Way, named
from autopack.layout.token_map import Batches, each_by_itself
from autopack.mixers import ALONE, RELATIVE, RESTARTING, ROWS, EncoderOneByOne, OneByOne

# Of the BART kind: they number tokens by columns and take no position_ids. Their embeddings of
# positions give every document those of the first columns; most have attention through the
# interface, the others are run on documents alone.
_NUMBERING_COLUMNS = """
bart bigbird_pegasus blenderbot blenderbot-small florence2 m2m_100 marian mbart musicgen_decoder
musicgen_melody_decoder mvp pegasus plbart seamless_m4t seamless_m4t_v2 speech_to_text trocr
"""
_LEARNED = "Bart BigBirdPegasus Blenderbot BlenderbotSmall MBart Mvp PLBart TrOCR"
_SINUSOIDAL = "Marian Musicgen MusicgenMelody Pegasus"
_NUMBERING_NO_PADDING = "M2M100 SeamlessM4T SeamlessM4Tv2 Speech2Text TrOCR"
"""Models whose sinusoidal embeddings number the tokens that are no padding."""


def _refuse_block_sparse(config: Any) -> str | None:
    """Return the reason to refuse an encoder with block-sparse attention, or None."""
    if config.is_encoder_decoder:
        return why_not_block_sparse(config, "encoder", "BigBirdPegasusEncoder")
    return None


COLUMN_POSITIONS = Family(
    name="column_positions",
    model_types=named(_NUMBERING_COLUMNS),
    how="positions restarted; attention document by document",
    positions=False,
    media_types={"sound": named("speech_to_text")},
    refusal=_refuse_block_sparse,
    mixers={
        **{f"{model}LearnedPositionalEmbedding": RESTARTING for model in _LEARNED.split()},
        **{f"{model}SinusoidalPositionalEmbedding": RESTARTING for model in _SINUSOIDAL.split()},
        **{
            f"{model}SinusoidalPositionalEmbedding": ROWS for model in _NUMBERING_NO_PADDING.split()
        },
        **dict.fromkeys("BigBirdPegasusSelfAttention MvpAttention TrOCRAttention".split(), ALONE),
    },
    tiny=Tiny(images={"square": named("florence2")}),
)

# T5 and its kin make relative distances a bias of attention, which has neither positions nor a
# scale. In a packed row it would be one of the row: dense, and counted from its beginning. Switch
# Transformers lets an expert take so many tokens of a row and drops the rest, so its experts are
# run on documents as rows.

T5 = Family(
    name="t5",
    model_types=named("mt5 pop2piano switch_transformers t5 umt5"),
    how="bias of the longest document; attention document by document, across halves too",
    positions=False,
    mixers={
        **{
            f"{model}Attention": RELATIVE for model in "MT5 Pop2Piano SwitchTransformers T5".split()
        },
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
        # No mask: it says where padding lies, and documents have none.
        outputs = [_routed(call, batch.gather(rows)[0]) for batch in found.maps]
        routed = found.together([tuple(part[None] for part in output) for output in outputs])
        return tuple(part.flatten(0, 1) for part in routed)


def _routed(call: MixerCall, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a router's output for one document, and restore the router's capacity.

    In evaluation it keeps the capacity of its last call, which would become its capacity in
    training from then on.
    """
    router: Any = call.mixer
    capacity = router.expert_capacity
    try:
        return call.original(router, tokens)
    finally:
        router.expert_capacity = capacity


def _refuse_random_experts(config: Any) -> str | None:
    """Return the reason to refuse a router that draws experts at random, or None."""
    if config.second_expert_policy in ("random", "sampling"):
        return (
            f"with second_expert_policy={config.second_expert_policy!r} NllbMoeTop2Router draws "
            "second experts anew at every call, in evaluation too, so no document has one result "
            "of its own"
        )
    return None


NLLB_MOE = Family(
    name="nllb_moe",
    model_types=named("nllb-moe"),
    how=(
        "positions restarted; attention document by document; routers on one document after another"
    ),
    positions=False,
    refusal=_refuse_random_experts,
    mixers={"NllbMoeSinusoidalPositionalEmbedding": ROWS, "NllbMoeTop2Router": _RoutingAlone()},
)

# Blocks of the row reach everywhere in it, or the decoder's tokens and the encoder's states share a
# softmax.
_ENCODERS = {
    "its encoder pads the row to a multiple of its window and attends by blocks": "LEDEncoder",
    "its encoder attends by blocks of the row and hands on their padded bias": "LongT5Stack",
    "its encoder attends by blocks of the row and through global tokens": "PegasusXEncoder",
}

WHOLE_HALF = Family(
    name="whole_half",
    model_types=named("led longt5 pegasus_x t5gemma2"),
    how=(
        "one half as a whole, documents of like lengths as a batch; attention document by "
        "document in the other"
    ),
    positions=False,
    mixers={
        **{name: EncoderOneByOne(reason) for reason, name in _ENCODERS.items()},
        "LEDLearnedPositionalEmbedding": RESTARTING,
        "LongT5Attention": RELATIVE,
        "PegasusXSinusoidalPositionalEmbedding": RESTARTING,
        "T5Gemma2Decoder": OneByOne(
            "its decoder attends to its own tokens and to the encoder's states in one softmax",
        ),
    },
    tiny=Tiny(images={"square": named("t5gemma2")}),
)

_TOKENS_FIRST = "its attention has tokens before the batch"


class _FsmtDecoder(OneByOne):
    """Strategy for FSMT's decoder, where documents get the beginning of a mask (columns, columns).

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
FSMT = Family(
    name="fsmt",
    model_types=named("fsmt"),
    how="each half as a whole, documents of like lengths as a batch",
    positions=False,
    mixers={"FSMTEncoder": OneByOne(_TOKENS_FIRST), "FSMTDecoder": _FsmtDecoder(_TOKENS_FIRST)},
)
