"""Models of which nothing smaller than the whole can be kept within documents: each document runs
alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopack.family import Family, MixerCall, Numbering, Tiny
from autopack.mixers import OneByOne

_STREAMS = "its streams of n-grams are numbered from the start of the row"
_MODELS = {
    "its byte patches and n-gram embeddings run across documents": "BltForCausalLM BltModel",
    "its tokens, prompts and positions are numbered from the start of the row": "CpmAntForCausalLM CpmAntModel",
    "its characters are taken together by columns of the row, and its attention goes by blocks of it": "CanineModel",
    "its key-value compressors pool windows counted from the row's start": "DeepseekV4ForCausalLM DeepseekV4Model",
    "its indexer selects blocks of keys counted from the row's start": "MiniMaxM3VLForCausalLM MiniMaxM3VLTextModel",
    "its indexer pools keys by windows counted from the row's start, and selects among those of all of it": (
        "Glm5NextTextModel"
    ),
    _STREAMS: "ProphetNetForCausalLM ProphetNetEncoder",
    "its relative encodings and streams are made for the row": "XLNetLMHeadModel XLNetModel",
    "its attention averages keys over blocks of 32 columns and looks closely at the best blocks of the row": "MraModel",
    "its encoder pools every two columns of the row into one": "FunnelModel FunnelBaseModel",
}

_REFORMER = OneByOne("its hashes and chunks go over the row", numbers_itself=True)
"""Strategy for Reformer, which pads documents to whole chunks itself, and cannot beside
positions."""


class _Streams(OneByOne):
    """Strategy for ProphetNet's decoder, which returns the streams of all n-grams one after the
    other.

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
                call.original(*args, **given),
                lambda t: t.unflatten(1, (n, -1)).transpose(1, 2),
            )

        arguments = {**call.arguments, "return_dict": True}
        output = super().run(replace(call, original=original, arguments=arguments))
        whole = _with_streams(output, lambda t: t.transpose(1, 2).flatten(1, 2))
        return whole if by_name else whole.to_tuple()


def _with_streams(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an output with its streams of n-grams changed."""
    last, states = output.last_hidden_state_ngram, output.hidden_states_ngram
    streams = {
        "last_hidden_state_ngram": None if last is None else change(last),
        "hidden_states_ngram": None if states is None else tuple(map(change, states)),
    }
    return type(output)(**{**output, **streams})


_BLT_HALF = {"vocab_size": 260, "hidden_size_global": 64}
_HEAVILY = "heavily_compressed_attention"
_TINY: dict[str, dict[str, Any]] = {
    "blt": {"vocab_size": 260, "patch_size": 4, "encoder_hash_byte_group_vocab": 61}
    | {"patcher_config": {"vocab_size": 260}, "encoder_config": _BLT_HALF, "decoder_config": _BLT_HALF},
    "deepseek_v4": {"layer_types": ["sliding_attention", _HEAVILY, "compressed_sparse_attention", _HEAVILY]}
    | {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]}
    | {
        "compress_rates": {"compressed_sparse_attention": 2, _HEAVILY: 4},
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    | {"partial_rotary_factor": 0.5, "index_topk": 2, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2}
    | {"hc_sinkhorn_iters": 2},
    "glm5_next_text": {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]}
    | {
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_kpool": 2,
    }
    | {"qk_rope_head_dim": 0, "head_dim": 0, "hc_mult": 2, "linear_num_heads": 2, "linear_head_dim": 8},
    "glm5_next_vision": {"projection_intermediate_size": 96},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    | {
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    # it numbers every pair of positions that there may be in every call
    "prophetnet": {"max_position_embeddings": 128},
    # chunks of one token: rows of any length need no padding, which upstream does in eval mode
    # alone
    "reformer": {"local_attn_chunk_length": 1, "local_num_chunks_before": 3}
    | {"lsh_attn_chunk_length": 1, "lsh_num_chunks_before": 3, "num_buckets": 4, "hash_seed": 0}
    | {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
}

_TYPES = """
blt canine cpmant deepseek_v4 funnel glm5_next minimax_m3_vl minimax_m3_vl_text mra prophetnet reformer xlnet
"""
_WITH_IMAGES = frozenset("glm5_next minimax_m3_vl".split())


def _refusal(config: Any) -> str | None:
    """Return why Reformer with random hashes is refused, or None."""
    if config.model_type == "reformer" and config.hash_seed is None and "lsh" in config.attn_layers:
        return "with hash_seed=None its hashes are drawn anew at every call, so no document has one result of its own"
    return None


WHOLE_MODEL = Family(
    name="one_by_one",
    model_types=frozenset(_TYPES.split()),
    how="the whole model, documents of one length as a batch",
    attends=False,
    refusal=_refusal,
    mixers={
        **{name: OneByOne(reason) for reason, names in _MODELS.items() for name in names.split()},
        "ProphetNetDecoder": _Streams(_STREAMS),
        **dict.fromkeys("ReformerModelWithLMHead ReformerForMaskedLM ReformerModel".split(), _REFORMER),
    },
    media_types={"video": _WITH_IMAGES},
    numbering={"mra": Numbering(start=2)},
    tiny=Tiny(
        configs=_TINY,
        causal={"reformer": {"is_decoder": True}, "xlnet": {"attn_type": "uni"}},
        images={"grid": _WITH_IMAGES},
    ),
)

_OF_BYTES = (
    "it gives as many logits as config.max_position_embeddings says, whatever a document's length "
    "(PerceiverForMaskedLM.__init__: `output_index_dims=config.max_position_embeddings`), and its "
    "loss takes labels of no other number, so the tokens of a packed row have none of their own"
)

PERCEIVER = Family(
    name="perceiver",
    model_types=frozenset({"perceiver"}),
    how="the whole model, documents of one length as a batch",
    attends=False,
    refused_classes={"PerceiverForMaskedLM": _OF_BYTES},
    mixers={"PerceiverForSequenceClassification": OneByOne("its latents attend to all tokens of the row")},
    tiny=Tiny(configs={"perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2}}),
)
