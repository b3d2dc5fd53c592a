"""Decoders and encoders with attention code of their own, which runs on documents alone, or with
something beside attention that depends on the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopack.errors import UnsupportedModel
from autopack.family import AFTER_PAD_TOKEN, Family, MixerCall, Numbering, Way
from autopack.layout.packed import PackedLayout, real_tokens
from autopack.layout.token_map import Batches, each_by_itself, equally_long, spread_tokens
from autopack.mixers import ALONE, Alone, Rows
from autopack.mixers.alone import count_from_zero

# Their attention adds a bias by distance (ALiBi, arXiv 2108.12409).
ALIBI = Family.of(
    "alibi",
    "bloom mpt",
    "the model's own attention, documents alone; biases restart",
    positions=False,
    mixers={"BloomAttention": Alone(per_head=("alibi",)), "MptAttention": Alone(by_columns=True)},
)


def why_not_block_sparse(
    config: Any, part: str = "attention", owner: str = "BigBirdModel"
) -> str | None:
    """Return the reason to refuse block-sparse `part` of BigBird's kind, or None if not sparse."""
    if getattr(config, "attention_type", None) != "block_sparse":
        return None
    return (
        f"what its block-sparse {part} gives a document depends on the calls before, since a short "
        f"row makes it attend fully for good ({owner}.forward: "
        "`self.set_attention_type('original_full')`); load it with attention_type='original_full'"
    )


# Its encoder makes a table of rotations for the columns of its rows.
ROFORMER = Family.of(
    "roformer",
    "roformer",
    "the model's encoder, documents alone",
    positions=False,
    mixers={"RoFormerEncoder": Alone(by_columns=True)},
)


class _ByCells(Way):
    """Strategy for TAPAS: positions restart in every cell, and cells of two tables share numbers.

    Positions that count from 0 only declare where a document begins: alone, the document would get
    no positions, and number tokens by their cells. Other positions are used as given.
    """

    recurs = False
    counts = True

    def run(self, call: MixerCall) -> Any:
        call.check()
        found, outputs = Batches.grouped(call.layout, each_by_itself), []
        bare = replace(call, arguments={**call.arguments, "position_ids": None})
        for batch in found.maps:
            given = spread_tokens(call.arguments["position_ids"], batch.shape, batch.gather)
            outputs.append((bare if count_from_zero(given) else call).by_documents(batch.gather))
        return found.together(outputs)


TAPAS = Family.of(
    "tapas",
    "tapas",
    "the model's own attention, documents alone; positions restart in every cell of a document's "
    "table",
    mixers={"TapasEmbeddings": _ByCells(), "TapasSelfAttention": ALONE},
)


class _InWindows(Way):
    """Strategy for Longformer's windows in chunks of padded rows, with tokens of global attention.

    The model pads rows to a multiple of the largest window before the embeddings, so its attention
    sees more columns than the layout has. Here every document is padded to such a multiple, as it
    is alone, and only its own tokens with global attention are global to it.
    """

    attends = True
    recurs = False
    in_parts = False  # its model pads the rows before

    def run(self, call: MixerCall) -> Any:
        layout = call.layout
        mixer: Any = call.mixer
        rows, mask = call.arguments["hidden_states"], call.arguments["attention_mask"]
        # below 0 is padding, above it global
        hidden, seen = rows[:, : layout.columns], mask[:, : layout.columns]
        if call.want_weights and bool((seen > 0).any()):
            raise UnsupportedModel(
                f"{type(mixer).__name__} gives attention weights in a form that depends on the "
                "number of tokens with global attention, which packed documents do not share. "
                "Leave output_attentions or global_attention_mask out, or run the documents one "
                "per row.",
                code="output-asked",
            )
        windows = mixer.config.attention_window
        window: int = max(windows) if isinstance(windows, list | tuple) else windows
        found = Batches.grouped(layout, equally_long)
        outputs = []
        somewhere = call.arguments.get("is_global_attn", True)  # known on the host, unlike masks
        for batch in found.maps:
            length = batch.into[1]
            more = -length % window
            own = functional.pad(batch.gather(seen), (0, more), value=torch.finfo(seen.dtype).min)
            output = call.original(
                mixer,
                functional.pad(batch.gather(hidden), (0, 0, 0, more)),
                attention_mask=own,
                is_index_masked=own < 0,
                is_index_global_attn=own > 0,
                is_global_attn=bool(somewhere and (own > 0).any()),
                output_attentions=call.want_weights,
            )
            outputs.append(tuple(part[:, :length] for part in output))
        added = (0, rows.shape[1] - layout.columns)
        return tuple(
            functional.pad(part, (0, 0) * (part.dim() - 2) + added)
            for part in found.together(outputs)
        )


class _EveryColumn(Way):
    """Strategy for XLM that counts every column of a packed row as a token.

    Upstream counts the tokens other than padding tokens, keeps the states of as many columns from
    the left, and zeroes the others. Padding between documents or at the left of a row would thus
    cut as many tokens at its right end. Padding behind documents, which attends to itself alone,
    would see nothing and have NaN gradients. A document that holds the padding token among its own
    tokens would end earlier alone, and is refused.
    """

    recurs = False

    def run(self, call: MixerCall) -> Any:
        layout, mixer, ids = call.layout, call.mixer, call.arguments.get("input_ids")
        if ids is not None and bool(
            (ids.eq(mixer.pad_index) & layout.upload(real_tokens(layout))).any()
        ):
            raise UnsupportedModel(
                f"a document holds the padding token (config.pad_index={mixer.pad_index}), by "
                f"which {type(mixer).__name__} counts tokens, and would be cut short alone. Give "
                "padding an attention_mask of 0, and use another token in documents.",
                code="pad-token",
            )
        lengths = torch.full((layout.rows,), layout.columns, device=layout.device)
        return call.original(mixer, **{**call.arguments, "lengths": lengths})


_TYPES = """
big_bird codegen convbert deberta deberta-v2 falcon flaubert fnet gpt_neo gpt_neox_japanese gptj
ibert longformer luke megatron-bert mpnet nystromformer openai-gpt rembert squeezebert xglm xlm yoso
"""
_ATTENTION = """
Attention BigBirdSelfAttention CodeGenAttention FalconAttention GPTJAttention GPTNeoSelfAttention
GPTNeoXJapaneseAttention IBertSelfAttention MegatronBertSelfAttention RemBertSelfAttention
SqueezeBertEncoder XGLMAttention
"""
"""The first is OpenAI GPT's; in SqueezeBERT's layers tokens are the last axis."""
_BY_PAIRS = "DisentangledSelfAttention LukeSelfAttention MPNetSelfAttention MultiHeadAttention"
_READING_PADDING = """
ConvBertSelfAttention ConvLayer FNetBasicFourierTransform NystromformerSelfAttention
YosoSelfAttention
"""
"""`ConvLayer` is DeBERTa-v2's, where conv_kernel_size is set. Nystromformer has a convolution of
its values, and YOSO one mask for padding and tokens alike."""


def _refusal(config: Any) -> str | None:
    """Return the reason to refuse a configuration of one of these types, or None."""
    if config.model_type == "falcon" and config.alibi:
        return (
            "it rounds biases by distance to bfloat16, counted from the start of the row, and "
            "adds them to the mask"
        )
    if config.model_type == "ibert" and config.quant_mode:
        return (
            "with quant_mode=True its QuantAct modules quantise all tokens of a batch by one "
            "range, and in training move that range along with every batch; load it with "
            "quant_mode=False"
        )
    if (
        config.model_type == "nystromformer"
        and config.num_landmarks != config.segment_means_seq_len
    ):
        return (
            "NystromformerSelfAttention takes the means of segments of a row of exactly "
            f"segment_means_seq_len = {config.segment_means_seq_len} columns, padding included, "
            f"for its {config.num_landmarks} landmarks, so a document of another length has no "
            "result of its own; with num_landmarks=segment_means_seq_len it attends to all tokens"
        )
    if config.model_type == "yoso" and not config.use_expectation:
        return (
            "with use_expectation=False YosoSelfAttention draws new random hashes at every call, "
            "so not even two runs of one document agree; load it with use_expectation=True"
        )
    # Which blocks its sparse attention sees, and whether it is sparse, depends on the row.
    return why_not_block_sparse(config)


# Beside attention some have relative distances, convolutions or Fourier transforms.
OWN_ATTENTION = Family.of(
    "own_attention",
    _TYPES,
    "the model's own attention, documents alone",
    mixers={
        _ATTENTION: ALONE,
        _BY_PAIRS: Alone(by_columns=True),
        _READING_PADDING: Alone(by_columns=True, reads_padding=True),
        "LongformerSelfAttention": _InWindows(),
        "FlaubertModel XLMModel": _EveryColumn(),
    },
    refused_arguments={
        "entity_ids": "entities stand beside the row, and whose document they are of is not said"
    },
    refusal=_refusal,
    numbering={
        "ibert longformer luke": AFTER_PAD_TOKEN,
        "nystromformer yoso": Numbering(start=2),
        "mpnet": Numbering(start=2, uncounted=1),
    },
)


# --- Attention through the interface beside something that depends on the row: an adjustment, a
# site or a mixer.


def _scale_query_by_position(
    module: Any,
    layout: PackedLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return the call's states and options, with queries scaled by their column in the document.

    The model computes the temperatures in float32; only their ratio needs the precision of the
    query.
    """
    if module.attn_temperature_tuning and not module.use_rope:
        column = torch.arange(layout.columns, device=query.device)[None]
        precise = torch.promote_types(query.dtype, torch.float32)

        def scale(columns: Tensor) -> Tensor:
            steps = torch.floor((columns.float() + 1.0) / module.floor_scale)
            return (torch.log1p(steps) * module.attn_scale + 1.0).to(precise)

        ratio = scale(column - layout.start_columns) / scale(column)
        query = (query * ratio[:, None, :, None]).to(query.dtype)
    return query, key, value, options


# Layers without rotary embedding scale the query by its column in the row and not by its position,
# so a document further right is scaled more than it would be alone. The chunks of most layers are
# cut by column too, which the mask description already undoes.
LLAMA4 = Family.of(
    "llama4",
    "llama4 llama4_text",
    "attention site, document by document; query temperature restarts per document",
    adjustments={"Llama4TextAttention": _scale_query_by_position},
)


# Every layer keeps the strongest keys of the row, chosen by a learned score, and drops the others.
# Other documents are masked out of that choice, but keys of equal score (the same token twice) are
# told apart by an order that depends on the length of the row, so a document would keep other keys
# than it does alone.
DOGE = Family.of(
    "doge",
    "doge",
    "the model's own attention, documents alone",
    refusal=lambda config: (
        "with is_moe=True doge routes tokens of all rows and documents together"
        if getattr(config, "is_moe", False)
        else None
    ),
    mixers={"DogeAttention": ALONE},
)

# `token_dropout` scales its embeddings by the share of mask tokens in a row.
ESM = Family.of(
    "esm",
    "esm",
    "attention site, document by document; embeddings of documents alone",
    mixers={"EsmEmbeddings": ALONE},
)

# It joins each token with its left and right neighbour.
MOBILEBERT = Family.of(
    "mobilebert",
    "mobilebert",
    "embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
)


_EMBEDDINGS = """
CLIPTextEmbeddings CLIPSegTextEmbeddings MetaClip2TextEmbeddings OwlViTTextEmbeddings
Owlv2TextEmbeddings SiglipTextEmbeddings Siglip2TextEmbeddings Tipsv2TextEmbeddings
XCLIPTextEmbeddings
"""
_TEXT_TOWERS = """
clip_text_model clipseg_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model
siglip2_text_model siglip_text_model tipsv2_text_model xclip_text_model
"""

# Embeddings of CLIP's kind look at each token by itself, and refuse rows of more columns than
# positions. What the towers pick of every row is looked after where outputs are (`calls.outputs`).
TEXT_TOWERS = Family.of(
    "text_towers",
    _TEXT_TOWERS,
    "attention site, document by document; embeddings of documents as rows",
    mixers={_EMBEDDINGS: Rows(recurs=False)},
)
