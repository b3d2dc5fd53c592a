"""GPT-2, which with `reorder_and_upcast_attn` and eager attention attends in a method of its own, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopack.attention import per_document
from autopack.attention.call import AttentionCall
from autopack.family import Family
from autopack.patching import Site
from autopack.runtime.scope import site_scope


def _attend_per_document(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    def _upcast_and_reordered_attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        scope = site_scope(self)
        if scope is None or scope.layout is None or self.is_cross_attention:
            return original(self, query, key, value, attention_mask, *args, **kwargs)

        def attend(module: Any, *states: Any) -> Any:
            return original(module, *states, *args, **kwargs)

        layout = scope.layout.to(query.device)
        return per_document.attend(
            AttentionCall(
                attend, "eager", self, query, key, value, attention_mask, layout, want_weights=scope.want_weights
            )
        )

    return _upcast_and_reordered_attn


FAMILY = Family(
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
