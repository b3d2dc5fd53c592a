"""Doge: every layer keeps the strongest keys of the row, chosen by a learned score, and drops the others.

The choice runs over the whole row. Other documents are masked out of it, but keys of equal score (the same token twice)
are told apart by an order that depends on the length of the row, so a document keeps other keys than it would alone.
Made per document, the choice is the same. With `is_moe=True` the experts' routing mixes tokens of different rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.family import Family
from autopack.patching import Site
from autopack.runtime.scope import site_scope


def _choose_keys_per_document(original: Callable[..., torch.Tensor], site: Site) -> Callable[..., torch.Tensor]:
    def prepare_dynamic_mask(
        self: Any,
        hidden_states: torch.Tensor,
        dt_states: torch.Tensor,
        keep_window_size: int = 2048,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
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


FAMILY = Family(
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
