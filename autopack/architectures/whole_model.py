"""Models that only run as a whole on each document alone: nothing smaller keeps documents apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopack.family import Family, MixerCall, Numbering
from autopack.mixers import OneByOne

_STREAMS = "its streams of n-grams are numbered from the start of the row"
_REASONS = {
    "BltForCausalLM BltModel": "its byte patches and n-gram embeddings run across documents",
    "CpmAntForCausalLM CpmAntModel": "its tokens, prompts and positions are numbered from the "
    "start of the row",
    "CanineModel": "its characters are taken together by columns of the row, and its attention "
    "goes by blocks of it",
    "DeepseekV4ForCausalLM DeepseekV4Model": "its key-value compressors pool windows counted from "
    "the row's start",
    "MiniMaxM3VLForCausalLM MiniMaxM3VLTextModel": "its indexer selects blocks of keys counted "
    "from the row's start",
    "Glm5NextTextModel": "its indexer pools keys by windows counted from the row's start, and "
    "selects among those of all of it",
    "ProphetNetForCausalLM ProphetNetEncoder": _STREAMS,
    "XLNetLMHeadModel XLNetModel": "its relative encodings and streams are made for the row",
    "MraModel": "its attention averages keys over blocks of 32 columns and looks closely at the "
    "best blocks of the row",
    "FunnelModel FunnelBaseModel": "its encoder pools every two columns of the row into one",
    "PerceiverForSequenceClassification": "its latents attend to all tokens of the row",
}

_REFORMER = OneByOne("its hashes and chunks go over the row", numbers_itself=True)
"""Strategy for Reformer, which pads documents to whole chunks itself, and cannot beside
positions."""


class _Streams(OneByOne):
    """Strategy for ProphetNet's decoder, which returns streams of n-grams one after the other.

    Its states are (documents, n * tokens, ...), as its head needs them. A packed call leaves out
    the results of all streams but the first.
    """

    leaves_out = ("logits_ngram", "last_hidden_state_ngram", "decoder_ngram_hidden_states")

    def run(self, call: MixerCall) -> Any:
        if call.memory is None:
            return super().run(call)
        n = call.mixer.ngram
        by_name = call.arguments.get("return_dict") is not False

        def original(*args: Any, **given: Any) -> Any:
            return _with_streams(
                call.original(*args, **given), lambda t: t.unflatten(1, (n, -1)).transpose(1, 2)
            )

        arguments = {**call.arguments, "return_dict": True}
        output = super().run(replace(call, original=original, arguments=arguments))
        whole = _with_streams(output, lambda t: t.transpose(1, 2).flatten(1, 2))
        return whole if by_name else whole.to_tuple()


def _with_streams(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an output with `change` applied to its streams of n-grams."""
    last, states = output.last_hidden_state_ngram, output.hidden_states_ngram
    streams = {
        "last_hidden_state_ngram": None if last is None else change(last),
        "hidden_states_ngram": None if states is None else tuple(map(change, states)),
    }
    return type(output)(**{**output, **streams})


_TYPES = """
blt canine cpmant deepseek_v4 funnel glm5_next minimax_m3_vl minimax_m3_vl_text mra perceiver
prophetnet reformer xlnet
"""


_OF_BYTES = (
    "it gives as many logits as config.max_position_embeddings says, whatever a document's length "
    "(PerceiverForMaskedLM.__init__: `output_index_dims=config.max_position_embeddings`), and its "
    "loss takes labels of no other number, so the tokens of a packed row have none of their own"
)

WHOLE_MODEL = Family.of(
    "one_by_one",
    _TYPES,
    "the whole model, documents of one length as a batch",
    refusal=lambda config: (
        "with hash_seed=None its hashes are drawn anew at every call, so no document has one "
        "result of its own"
        if config.model_type == "reformer"
        and config.hash_seed is None
        and "lsh" in config.attn_layers
        else None
    ),
    mixers={
        **{names: OneByOne(reason) for names, reason in _REASONS.items()},
        "ProphetNetDecoder": _Streams(_STREAMS),
        "ReformerModelWithLMHead ReformerForMaskedLM ReformerModel": _REFORMER,
    },
    refused_classes={"PerceiverForMaskedLM": _OF_BYTES},
    media_types={"video": "glm5_next minimax_m3_vl"},
    numbering={"mra": Numbering(start=2)},
)
