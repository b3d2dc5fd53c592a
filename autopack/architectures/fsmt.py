"""FSMT: attention that takes tokens before the batch, in halves that are no models, only modules.

Each half as a whole is run on documents alone. The model is one of its own in two things more: where it gets labels and
no tokens for its decoder, it takes the encoder's; and where it may fill a cache, its decoder hides no later tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autopack.family import Family, MixerCall, Tiny
from autopack.mixers import OneByOne

_REASON = "its attention has tokens before the batch"


class _Decoder(OneByOne):
    """The decoder is given a mask of all pairs, (columns, columns), which begins with what a document alone has."""

    reads_encoder_tokens = True
    masks_without_cache = True

    def run(self, call: MixerCall) -> Any:
        def original(decoder: nn.Module, **given: Any) -> Any:
            tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
            mask, length = given.get("decoder_causal_mask"), tokens.shape[1]
            given["decoder_causal_mask"] = None if mask is None else mask[:length, :length]
            return call.original(decoder, **given)

        return super().run(replace(call, original=original))


FAMILY = Family(
    name="fsmt",
    model_types=frozenset({"fsmt"}),
    how="each half as a whole, documents of like lengths as a batch",
    attends=False,
    positions=False,
    mixers={"FSMTEncoder": OneByOne(_REASON), "FSMTDecoder": _Decoder(_REASON)},
    tiny=Tiny(configs={"fsmt": {"src_vocab_size": 128, "tgt_vocab_size": 128}}),
)
