"""Encoder-decoders of which one half, as a whole, is run on documents alone.

Blocks of the row reach everywhere in it, or the decoder's tokens and the encoder's states share a softmax. Of FSMT both
halves are, which are no models, only modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autopack.family import Family, MixerCall, Tiny
from autopack.mixers import RELATIVE, RESTARTING, EncoderOneByOne, OneByOne

_ENCODERS = {
    "its encoder pads the row to a multiple of its window and attends by blocks of it": "LEDEncoder",
    "its encoder attends by blocks of the row, and pads them into the bias that it hands on": "LongT5Stack",
    "its encoder attends by blocks of the row and through tokens that all of it shares": "PegasusXEncoder",
}

WHOLE_HALF = Family(
    name="whole_half",
    model_types=frozenset("led longt5 pegasus_x t5gemma2".split()),
    how="one half as a whole, documents of like lengths as a batch; attention document by document in the other",
    positions=False,
    mixers={
        **{name: EncoderOneByOne(reason) for reason, name in _ENCODERS.items()},
        "LEDLearnedPositionalEmbedding": RESTARTING,
        "LongT5Attention": RELATIVE,
        "PegasusXSinusoidalPositionalEmbedding": RESTARTING,
        "T5Gemma2Decoder": OneByOne("its decoder attends to its own tokens and to the encoder's states in one softmax"),
    },
    media_types={"image": frozenset({"t5gemma2"})},
    tiny=Tiny(
        configs={
            "led": {"attention_window": 4},
            "longt5": {"local_radius": 3, "global_block_size": 4},
            "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
            "t5gemma2": {"image_token_index": 120, "encoder": {"image_token_index": 120, "mm_tokens_per_image": 4}},
        },
        images={"square": frozenset({"t5gemma2"})},
    ),
)

_TOKENS_FIRST = "its attention has tokens before the batch"


class _FsmtDecoder(OneByOne):
    """It is given a mask of all pairs, (columns, columns), which begins with what a document alone has.

    Given labels and no tokens for its decoder, its model takes the encoder's.
    """

    reads_encoder_tokens = True
    masks_without_cache = True

    def run(self, call: MixerCall) -> Any:
        def original(decoder: nn.Module, **given: Any) -> Any:
            tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
            mask, length = given.get("decoder_causal_mask"), tokens.shape[1]
            given["decoder_causal_mask"] = None if mask is None else mask[:length, :length]
            return call.original(decoder, **given)

        return super().run(replace(call, original=original))


FSMT = Family(
    name="fsmt",
    model_types=frozenset({"fsmt"}),
    how="each half as a whole, documents of like lengths as a batch",
    attends=False,
    positions=False,
    mixers={"FSMTEncoder": OneByOne(_TOKENS_FIRST), "FSMTDecoder": _FsmtDecoder(_TOKENS_FIRST)},
    tiny=Tiny(configs={"fsmt": {"src_vocab_size": 128, "tgt_vocab_size": 128}}),
)
