"""The replacements that stand at transformers' attention and mask functions while a model is enabled.

Both are inert outside a packed forward of an enabled model: they hand the call on as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.attention import choose as choosing
from autopack.attention.backends.compiled import attend_compiled
from autopack.attention.backends.cross import attend_across
from autopack.attention.backends.flash import attend_flash
from autopack.attention.backends.flex import attend_flex
from autopack.attention.backends.per_document import attend_documents
from autopack.attention.backends.varlen import attend_varlen
from autopack.attention.document_mask import DocumentMask
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks, releases
from autopack.layout.packed import PackedLayout
from autopack.patching import Site
from autopack.runtime.marks import mark_of
from autopack.runtime.scope import Scope, site_scope


def adapt_attention(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """An attention function that keeps the documents of enabled models apart."""
    # A registered function goes by its key; one in a modeling module is what that model calls eager attention.
    implementation = site.key or "eager"

    def autopack_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        scope = site_scope(module)
        if scope is None or scope.layout is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if args:
            raise SiteDrift(f"{type(module).__name__} passes options to {site} by position; autopack needs names")
        return _attend(original, implementation, scope, module, query, key, value, attention_mask, kwargs)

    autopack_attention.autopack_original = original  # type: ignore[attr-defined]
    return autopack_attention


def _attend(
    original: Callable[..., Any],
    implementation: str,
    scope: Scope,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout, mark = scope.layout, mark_of(module)
    assert layout is not None
    assert mark is not None
    memory = scope.memory if mark.reads_encoder else None
    _check_shapes(module, layout, memory or layout, query, key)
    if query.device != layout.device:
        layout = layout.to(query.device)
    if memory is not None:
        memory = memory.to(query.device)
        return _attend_across(original, implementation, layout, memory, module, query, key, value, mask, options)
    adjust = mark.adjustment
    if adjust is not None:
        query, key, value, options = adjust(module, layout, query, key, value, options)
    backend = choosing.choose(scope.model.options.backend, implementation, module, query, value, mask, options)
    if backend == "flash":
        return attend_flash(original, layout, module, query, key, value, mask, options)
    if backend == "varlen":
        pattern = choosing.pattern_of(module, mask, options)
        assert pattern is not None
        scale, sinks = options.get("scaling"), options.get("s_aux")
        return attend_varlen(layout, query, key, value, pattern, scale, sinks), None
    if backend == "flex":
        causal = choosing.is_causal(module, options)
        return attend_flex(layout, module, query, key, value, mask, options, causal)
    if backend == "sdpa":
        if implementation != "sdpa":
            original = _registered("sdpa")
            mask = mask.made_by(_registered_mask("sdpa")) if isinstance(mask, DocumentMask) else mask
        if torch.compiler.is_compiling():
            pattern = choosing.pattern_of(module, mask, options)
            if pattern is not None and not options.get("dropout") and options.get("position_bias") is None:
                return attend_compiled(layout.cu_seqlens, query, key, value, pattern, options.get("scaling")), None
    return _attend_documents(original, layout, module, query, key, value, mask, options, scope.want_weights)


# Lengths on the host would be constants of a compiled graph, and every layout a graph of its own.
_attend_documents = torch._dynamo.disable(attend_documents)
_attend_across = torch._dynamo.disable(attend_across)


def _registered(implementation: str) -> Callable[..., Any]:
    function = releases.attention_function(implementation)
    return getattr(function, "autopack_original", function)  # type: ignore[return-value]


def _registered_mask(implementation: str) -> Callable[..., Any]:
    function = masks.mask_function(implementation)
    return getattr(function, "autopack_original", function)  # type: ignore[return-value]


def _check_shapes(
    module: torch.nn.Module, layout: PackedLayout, memory: PackedLayout, query: torch.Tensor, key: torch.Tensor
) -> None:
    """Queries must be those of `layout`, keys those of `memory`."""
    if tuple(query.shape[::2]) != (layout.rows, layout.columns) or key.shape[::2] != (memory.rows, memory.columns):
        raise UnsupportedModel(
            f"{type(module).__name__} attends from {query.shape[2]} queries to {key.shape[2]} keys in {len(query)} "
            f"rows, but the packed batch has {layout.rows} rows of {layout.columns} tokens"
            + (f" to attend to {memory.columns} states of the encoder" if memory is not layout else "")
            + ". Prefixes and cross-attention to other states cannot be packed; run such documents one per row."
        )
