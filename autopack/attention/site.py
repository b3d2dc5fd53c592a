"""The replacement that stands at transformers' attention functions while a model is enabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopack.attention import cross, prefixes, sequence_parallel
from autopack.attention.call import AttentionCall, Output
from autopack.attention.choose import BACKENDS, choose
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import releases, ulysses
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.patching import Site
from autopack.runtime.scope import Scope, mark_of, refuse_stranger, site_scope

PARAMETERS = ("module", "query", "key", "value", "attention_mask")
"""What an attention function of transformers takes first."""


def adapt_attention(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """An attention function that keeps the documents of enabled models apart.

    Outside a packed forward of an enabled model it hands the call on as it came.
    """
    if releases.is_own(original):  # somebody else's may name its arguments as it likes
        site.check_takes(original, PARAMETERS)
    # A registered function goes by its key; one in a modeling module is what that model calls eager attention.
    name = site.key or "eager"
    exchanges = ulysses.exchange_of(original) is not None

    def autopack_attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        mark, scope = mark_of(module), site_scope(module, one_token=query.shape[2] == 1)
        seen = None if scope is None else scope.images
        if mark is None or scope is None or (scope.layout is None and not (seen and mark.reads_images)):
            refuse_stranger(module, query.shape[0], query.shape[2])
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if args:
            raise SiteDrift(
                f"{type(module).__name__} passes options to {site} by position; autopack needs names. Run `autopack "
                f"doctor` to see which versions are supported."
            )
        if mark.reads_images:
            if seen is None:
                raise UnsupportedModel(
                    f"{type(module).__name__} attends to images inside a packed forward whose call does not say which "
                    f"document sees which. Run the documents one per row."
                )
            options = {name: option for name, option in kwargs.items() if name not in LAYOUT_KWARGS}
            return cross.attend_to_images(original, module, (query, key, value), attention_mask, options, seen)
        assert scope.layout is not None
        layout = scope.layout.to(query.device)
        memory = scope.memory.to(query.device) if scope.memory is not None and mark.reads_encoder else None
        if scope.prefixes is not None:
            _check_shapes(module, scope.prefixes.queries, scope.prefixes.queries, query, key)
        elif scope.shared is None:
            _check_shapes(module, layout, memory or layout, query, key)
        else:
            sequence_parallel.check_shapes(module, layout, scope.shared, query, key)
        options = {name: option for name, option in kwargs.items() if name not in LAYOUT_KWARGS}
        if mark.adjustment is not None and memory is None:
            query, key, value, options = mark.adjustment(module, layout, query, key, value, options)
        # DeepSpeed's loses masks, also where it exchanges nothing.
        function = ulysses.of_whole_rows(original) if exchanges else original
        call = AttentionCall(
            function, name, module, query, key, value, attention_mask, layout, options, memory, scope.want_weights
        )
        if memory is not None:
            return cross.attend(call)
        if scope.shared is not None:
            return _attend_over_ranks(call, scope)
        if scope.prefixes is not None:
            backend = BACKENDS[choose(scope.model.options.backend, call)]
            return prefixes.attend(call, scope.prefixes, backend), None
        return BACKENDS[choose(scope.model.options.backend, call)].attend(call)

    return autopack_attention


@torch._dynamo.disable  # graphs of exchanges are not measured
def _attend_over_ranks(call: AttentionCall, scope: Scope) -> Output:
    assert scope.shared is not None
    whole = sequence_parallel.with_whole_rows(call, scope.shared)
    output, _ = BACKENDS[choose(scope.model.options.backend, whole)].attend(whole)
    return sequence_parallel.parts_of_rows(output, whole, scope.shared, call.query.shape[1]), None


def _check_shapes(module: nn.Module, layout: PackedLayout, memory: PackedLayout, query: Tensor, key: Tensor) -> None:
    """Queries must be those of `layout`, keys those of `memory`."""
    if tuple(query.shape[::2]) != layout.shape or tuple(key.shape[::2]) != memory.shape:
        raise UnsupportedModel(
            f"{type(module).__name__} attends from {query.shape[2]} queries to {key.shape[2]} keys in {len(query)} "
            f"rows, but the packed batch has {layout.rows} rows of {layout.columns} tokens"
            + (f" to attend to {memory.columns} states of the encoder" if memory is not layout else "")
            + ". Prefixes and cross-attention to other states cannot be packed; run such documents one per row."
        )
