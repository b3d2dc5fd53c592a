"""NLLB-MoE: M2M100 with experts of which each takes so many tokens of a call, and those over it are dropped.

The router reckons how many from all tokens that it gets, so it is run on every document by itself; the experts, which
look at one token at a time, run on the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autopack.errors import UnsupportedModel
from autopack.family import Family, MixerCall, Tiny, Way
from autopack.layout.batches import Batches
from autopack.layout.packed import PackedLayout
from autopack.mixers import ROWS


class _RoutingAlone(Way):
    """The router takes (tokens, channels), and gives a tuple of such tensors."""

    reads_padding = True
    recurs = False
    words = "documents one by one"
    work = "the router itself, one document after another"

    def run(self, call: MixerCall) -> Any:
        layout, tokens = call.layout, call.arguments[call.first]
        if tokens.dim() != 2 or len(tokens) != layout.rows * layout.columns:
            raise UnsupportedModel(
                f"{type(call.mixer).__name__} got tokens of shape {tuple(tokens.shape)} inside a packed forward of "
                f"{layout.rows} rows of {layout.columns} tokens. Train the model on padded batches, one document per "
                f"row."
            )
        found = Batches.grouped(layout, _one_by_one)
        rows = tokens.unflatten(0, (layout.rows, layout.columns))
        # No mask: it says where padding lies, and documents have none.
        outputs = [_fresh(call, batch.spread(rows)[0]) for batch in found.batches]
        routed = found.together([tuple(part[None] for part in output) for output in outputs])
        return tuple(part.flatten(0, 1) for part in routed)


def _fresh(call: MixerCall, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the router gives for one document, which leaves nothing behind.

    In evaluation it keeps the capacity of what it got last, and that would be its capacity in training from then on.
    """
    router: Any = call.mixer
    capacity = router.expert_capacity
    try:
        return call.original(router, tokens)
    finally:
        router.expert_capacity = capacity


def _one_by_one(layout: PackedLayout) -> list[np.ndarray]:
    """Numbers of the documents, one in each group, without runs of padding, unless there is nothing else."""
    real = np.arange(len(layout.lengths)) if layout.is_padding is None else np.flatnonzero(~layout.is_padding)
    return np.split(real if len(real) else np.arange(len(layout.lengths)), max(len(real), 1))


def _refusal(config: Any) -> str | None:
    if config.second_expert_policy in ("random", "sampling"):
        return (
            f"with second_expert_policy={config.second_expert_policy!r} NllbMoeTop2Router draws second experts anew at "
            f"every call, in evaluation too, so no document has one result of its own"
        )
    return None


_SPARSE = dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 2)

FAMILY = Family(
    name="nllb_moe",
    model_types=frozenset({"nllb-moe"}),
    how="positions restarted; attention document by document; routers on one document after another",
    positions=False,
    refusal=_refusal,
    mixers={"NllbMoeSinusoidalPositionalEmbedding": ROWS, "NllbMoeTop2Router": _RoutingAlone()},
    # a sparse layer on both sides, and experts that documents overflow
    tiny=Tiny(configs={"nllb-moe": _SPARSE | {"expert_capacity": 3, "moe_eval_capacity_token_fraction": 0.3}}),
)
