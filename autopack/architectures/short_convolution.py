"""Hybrids of attention and short convolutions, whose taps reach into the document before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopack.family import Family, Tiny
from autopack.layout.packed import PackedLayout
from autopack.mixers import AtOperations, LookingBack

_TYPES = """
inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
zaya
"""
_AT_CONVOLUTION = """
Inkling2LoopShortConvolution Inkling2ShortConvolution InklingShortConvolution Lfm2MoeShortConv Lfm2ShortConv
Lfm3ShortConv
"""
_OVER_LAYERS = (  # each token over what earlier layers have made of it
    "Inkling2BlockAttentionResidual Inkling2LoopBlockAttentionResidual Inkling2LoopMessageAttentionResidual"
)

_FORMS = {"grid of tokens": "inkling2", "patches in time": "inkling_mm_model", "spatial patches": "lfm2_vl"}
_IMAGES = {form: frozenset({name}) for form, name in (_FORMS | {"grid": "lfm3_vl"}).items()}
_TINY: dict[str, dict[str, Any]] = {
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 4, "num_hidden_layers": 4}
    | {"layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid"]}
    | {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2},
    "inkling2_text": {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 4},
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"], "logits_mup_width_multiplier": 1.0}
    | {"log_scaling_n_floor": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 4}
    | {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def _by_its_taps(mixer: Any) -> int | None:
    width = getattr(mixer, "conv_kernel_size", None)  # releases before 5.23 have other names
    return None if width is None else width - 1


def _by_convolutions_or_delayed_value(mixer: Any) -> int | None:
    taps = getattr(mixer, "conv_kernel_size", None)  # of both convolutions, the present token not counted
    return None if taps is None else max(taps, 1)


def _temperature(config: Any, columns: Tensor) -> Tensor:
    return 1.0 + config.log_scaling_alpha * torch.log(
        ((columns + 1).float() / config.log_scaling_n_floor).clamp(min=1.0)
    )


def _scale_by_position(
    module: Any, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Inkling's full attention scales queries and their distance bias by the column of the row, from a floor on."""
    if module.config.log_scaling_n_floor is not None and not module.is_sliding:
        column = torch.arange(layout.columns, device=query.device)[None]
        # The temperatures are those that the model computes, in float32; only their ratio needs the query's precision.
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        wanted, given = (_temperature(module.config, c).to(wide) for c in (column - layout.start_columns, column))
        ratio = (wanted / given)[:, None, :, None]
        query = (query * ratio).to(query.dtype)
        bias = options["position_bias"]
        options = {**options, "position_bias": (bias * ratio).to(bias.dtype)}
    return query, key, value, options


def _follow_positions(
    module: Any, layout: PackedLayout, *states: Tensor | dict[str, Any]
) -> tuple[Tensor | dict[str, Any], ...]:
    """Inkling 2 scales by `position_ids`, which is right in packed rows. In a batch with padding on the left they count
    the padding too, while its convolutions would start anew behind it; having an adjustment, it is left padded."""
    return states


FAMILY = Family(
    name="short_convolution",
    model_types=frozenset(_TYPES.split()),
    how="taps masked at the start of each document; attention document by document",
    mixers={
        **dict.fromkeys(_AT_CONVOLUTION.split(), AtOperations(("causal_conv1d_fn",))),
        **dict.fromkeys(
            ("Inkling2DynamicShortConvolution", "Inkling2LoopDynamicShortConvolution"), LookingBack(_by_its_taps)
        ),
        "ZayaCCAProjection": LookingBack(_by_convolutions_or_delayed_value),
    },
    within_token=frozenset(_OVER_LAYERS.split()),
    adjustments={
        "InklingAttention": _scale_by_position,
        **dict.fromkeys(("Inkling2FullAttention", "Inkling2LoopFullAttention"), _follow_positions),
    },
    media_types={
        "image": frozenset().union(*_IMAGES.values()),
        "video": frozenset({"lfm3_vl"}),
        "sound": frozenset({"inkling_mm_model"}),
    },
    tiny=Tiny(configs=_TINY, images=_IMAGES),
)
