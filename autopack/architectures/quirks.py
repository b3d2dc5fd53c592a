"""Attention through the interface beside something that depends on the row: an adjustment, a site
or a mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopack.attention import per_document
from autopack.attention.call import AttentionCall
from autopack.family import Family, MixerCall, Tiny, Way
from autopack.layout.packed import PackedLayout
from autopack.mixers import ALONE, Alone, Rows
from autopack.patching import Site
from autopack.runtime.scope import site_scope


def restarting(layout: PackedLayout, query: Tensor, temperature: Callable[[Tensor], Tensor]) -> Tensor:
    """Return factors (R, 1, C, 1) that turn queries scaled by columns of the row into those of a
    document alone.

    The model computes the temperatures in float32; only their ratio needs the precision of the
    query.
    """
    column = torch.arange(layout.columns, device=query.device)[None]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    wanted, given = (temperature(c).to(wide) for c in (column - layout.start_columns, column))
    return (wanted / given)[:, None, :, None]


def _scale_query_by_position(
    module: Any, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    def temperature(columns: Tensor) -> Tensor:
        return torch.log1p(torch.floor((columns.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    if module.attn_temperature_tuning and not module.use_rope:
        query = (query * restarting(layout, query, temperature)).to(query.dtype)
    return query, key, value, options


# Layers without rotary embedding scale the query by its column in the row and not by its position, so a document
# further right is scaled more than it would be alone. The chunks of most layers are cut by column too, which the mask
# description already undoes.
LLAMA4 = Family(
    name="llama4",
    model_types=frozenset("llama4 llama4_text".split()),
    how="attention site, document by document; query temperature restarts per document",
    adjustments={"Llama4TextAttention": _scale_query_by_position},
    media_types={"image": frozenset({"llama4"})},
    tiny=Tiny(
        configs={
            "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": [1], "floor_scale": 4},
            "llama4_vision_model": {"intermediate_size": 256}
            | dict.fromkeys("projector_input_dim projector_output_dim vision_output_dim".split(), 64),
        },
        images={"square": frozenset({"llama4"})},
    ),
)


def _attend_per_document(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def _upcast_and_reordered_attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        scope = site_scope(self)
        if scope is None or scope.layout is None or self.is_cross_attention:
            return original(self, query, key, value, attention_mask, *args, **kwargs)

        def attend(module: Any, *states: Any) -> Any:
            return original(module, *states, *args, **kwargs)

        layout, wanted = scope.layout.to(query.device), scope.want_weights
        call = AttentionCall(attend, "eager", self, query, key, value, attention_mask, layout, want_weights=wanted)
        return per_document.attend(call)

    return _upcast_and_reordered_attn


# With `reorder_and_upcast_attn` and eager attention it attends in a method of its own, in float32.
GPT2 = Family(
    name="gpt2",
    model_types=frozenset({"gpt2"}),
    how="attention site, document by document",
    sites=(
        Site(
            "transformers.models.gpt2.modeling_gpt2",
            "GPT2Attention._upcast_and_reordered_attn",
            _attend_per_document,
            parameters=("query", "key", "value", "attention_mask"),
        ),
    ),
)


def _choose_keys_per_document(original: Callable[..., Tensor], site: Site) -> Callable[..., Tensor]:
    def prepare_dynamic_mask(
        self: Any,
        hidden_states: Tensor,
        dt_states: Tensor,
        keep_window_size: int = 2048,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        scope = site_scope(self)
        if scope is None or scope.layout is None:
            return original(self, hidden_states, dt_states, keep_window_size, attention_mask)
        mask = dt_states.new_full((*dt_states.shape, dt_states.shape[-1]), torch.finfo(hidden_states.dtype).min)
        for row, first, end in scope.layout.spans:
            here = slice(row, row + 1), slice(first, end)
            within = None if attention_mask is None else attention_mask[here[0], :, here[1], here[1]]
            mask[here[0], :, here[1], here[1]] = original(
                self, hidden_states[here], dt_states[here[0], :, here[1]], keep_window_size, within
            )
        return mask

    return prepare_dynamic_mask


def _refusal(config: Any) -> str | None:
    mixes = getattr(config, "is_moe", False)
    return "with is_moe=True doge routes tokens of all rows and documents together" if mixes else None


# Every layer keeps the strongest keys of the row, chosen by a learned score, and drops the others. Other documents are
# masked out of that choice, but keys of equal score (the same token twice) are told apart by an order that depends on
# the length of the row, so a document keeps other keys than it would alone. Made per document, the choice is the same.
DOGE = Family(
    name="doge",
    model_types=frozenset({"doge"}),
    dense_types=frozenset({"doge"}),
    how="attention site, document by document; keys chosen per document",
    refusal=_refusal,
    sites=(
        Site(
            "transformers.models.doge.modeling_doge",
            "DogeAttention.prepare_dynamic_mask",
            _choose_keys_per_document,
            parameters=("hidden_states", "dt_states", "keep_window_size", "attention_mask"),
        ),
    ),
)


class _EmbeddedAlone(Way):
    """Strategy for ESM's embeddings, which `token_dropout` scales by the share of mask tokens in a
    row."""

    recurs = False

    def run(self, call: MixerCall) -> Any:
        if not getattr(call.mixer, "token_dropout", True):
            return call.changed(lambda name, value: value)
        return ALONE.run(call)


ESM = Family(
    name="esm",
    model_types=frozenset({"esm"}),
    how="attention site, document by document; embeddings of documents alone",
    mixers={"EsmEmbeddings": _EmbeddedAlone()},
    tiny=Tiny(configs={"esm": {"token_dropout": True, "mask_token_id": 4}}),
)

# It joins each token with its left and right neighbour.
MOBILEBERT = Family(
    name="mobilebert",
    model_types=frozenset({"mobilebert"}),
    how="embeddings of documents alone; attention document by document",
    mixers={"MobileBertEmbeddings": Alone(reads_padding=True)},
    tiny=Tiny(configs={"mobilebert": {"embedding_size": 32}}),
)


_TOWERS = "CLIP CLIPSeg MetaClip2 OwlViT Owlv2 Siglip Siglip2 Tipsv2 XCLIP"
_TYPES = """
clip_text_model clipseg_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model siglip2_text_model
siglip_text_model tipsv2_text_model xclip_text_model
"""

# Embeddings of CLIP's kind look at each token by itself, and refuse rows of more columns than positions. What the
# towers pick of every row is looked after where outputs are (`calls.outputs`).
TEXT_TOWERS = Family(
    name="text_towers",
    model_types=frozenset(_TYPES.split()),
    how="attention site, document by document; embeddings of documents as rows",
    mixers={f"{name}TextEmbeddings": Rows(recurs=False) for name in _TOWERS.split()},
)
