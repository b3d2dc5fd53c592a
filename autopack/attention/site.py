"""Replacement that stands at transformers' attention functions while a model is enabled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopack.attention import cross
from autopack.attention.call import AttentionCall, Backend, Output
from autopack.attention.choose import BACKENDS, own_backend
from autopack.attention.document_mask import DocumentMask
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks, releases, sharding, torches
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import LAYOUT_KWARGS
from autopack.patching import Site
from autopack.runtime.marks import MARK, mark_of
from autopack.runtime.row_group import RowGroup
from autopack.runtime.scope import Scope, ambient, running_scope, site_scope

PARAMETERS = ("module", "query", "key", "value", "attention_mask")
"""First parameters of an attention function of transformers."""
_OF_PARTS = ("position_ids", "cache_position", "shift_labels")
"""Options for the columns of a part, which models hand on, and attention does not need for
documents."""


def adapt_attention(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a function that serves packed forwards, else calls `original`; raise `SiteDrift`."""
    if releases.is_of_transformers(original):  # somebody else's may name its arguments as it likes
        site.check_takes(original, PARAMETERS)
    # A registered function goes by its key; one in a modeling module is what that model calls eager
    # attention.
    name = site.key or "eager"
    own = own_backend(name)
    exchange = sharding.exchange_of(original)
    # DeepSpeed's loses masks, also where it exchanges nothing.
    for_whole_rows = sharding.of_whole_rows(original)

    def autopack_attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mark, scope = module.__dict__.get(MARK), site_scope(module, one_token=query.shape[2] == 1)
        if (
            mark is None
            or scope is None
            or (scope.layout is None and not (scope.images and mark.reads_images))
        ):
            refuse_stranger(module, query.shape[0], query.shape[2])
            is_off = exchange is not None and "forward" in vars(exchange)  # a twin is asked
            function = for_whole_rows if is_off else original
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if args:
            raise SiteDrift(
                f"{type(module).__name__} passes options to {site} by position; autopack needs "
                "names. Run `autopack doctor` to see which versions are supported.",
                code="site-drift",
            )
        for told in LAYOUT_KWARGS:
            kwargs.pop(told, None)
        # The layout is None where only images are told apart.
        layout: Any = scope.layout and scope.layout.to(query.device)
        memory = scope.memory if mark.reads_encoder else None
        memory = memory and memory.to(query.device)
        if not mark.reads_images:
            _check_shapes(module, scope, memory, query, key)
            if mark.adjustment is not None and memory is None:
                query, key, value, kwargs = mark.adjustment(
                    module, layout, query, key, value, kwargs
                )
        given = query, key, value, attention_mask, layout, kwargs, memory, scope.want_weights
        call = AttentionCall(for_whole_rows, name, module, *given)
        if mark.reads_images:
            return cross.attend_to_images(call, scope.images)
        if memory is not None:
            return cross.attend(call)
        if scope.shared is not None:
            return _attend_over_ranks(call, scope, own)
        backend = _backend_of(call, scope.model.options.backend, own)
        if scope.prefixes is not None:
            return cross.attend_over_prefixes(call, scope.prefixes, backend), None
        return backend.attend(call)

    return autopack_attention


def _backend_of(call: AttentionCall, requested: str, own: str) -> Backend:
    """Return the backend for a call: `requested`, or the best that serves it; or raise.

    `own` is the backend of the implementation that the model was loaded with. Raises
    `UnsupportedModel` if the requested one cannot serve the call, or mask and `is_causal` differ.
    """
    # The model's own eager attention reads no `is_causal`, flash attention no mask, and flex makes
    # one in any case.
    if own in ("sdpa", "eager") and call.implementation != "eager":
        call.refuse_two_directions()
    if requested not in ("auto", own):
        reason = BACKENDS[requested].refusal(call)
        if reason is not None:
            raise UnsupportedModel(
                f"backend={requested!r} was asked for, but {type(call.module).__name__} cannot use "
                f"it: {reason}. Use backend='auto'.",
                code="backend-unavailable",
            )
        return BACKENDS[requested]
    if requested == "auto" and not call.replaces_sdpa:
        for backend in BACKENDS.values():
            runs = backend.devices is None or call.query.device.type in backend.devices
            if (
                own in backend.stands_in
                and runs
                and backend.refusal(call) is None
                and backend.availability()[0]
            ):
                return backend
    if own != "flex" or torches.is_block_mask(call.mask):
        return BACKENDS[own]
    # A mask of the model's own is cut by documents, and no BlockMask is made of it; so is a bias.
    by_documents = isinstance(call.mask, Tensor) or call.options.get("position_bias") is not None
    return BACKENDS["eager" if by_documents or not masks.has_mask_interface() else own]


def refuse_stranger(module: nn.Module, rows: int, columns: int) -> None:
    """Raise `UnsupportedModel` if an unmarked module attends over the rows of a packed forward.

    It belongs to no enabled model, so it would take the documents of a row for one.
    """
    scope = None if ambient.activation is None or mark_of(module) is not None else running_scope()
    if scope is None or scope.layout is None:
        return
    if (rows, columns) == scope.ran:
        raise UnsupportedModel(
            f"{type(module).__name__} attends over packed rows inside the forward of an enabled "
            "model, but it is no part of that model, so autopack does not keep their documents "
            "apart in it. Enable the model that it belongs to as well, or call that outside of "
            "this forward.",
            code="call-within-call",
        )


@torch._dynamo.disable  # graphs of exchanges are not measured
def _attend_over_ranks(call: AttentionCall, scope: Scope, own: str) -> Output:
    """Return (output, None) over rows that ranks share, as DeepSpeed-Ulysses (arXiv 2309.14509).

    Attention needs every token of a document, and nothing of other heads. So ranks exchange tokens
    of a part and all heads for all tokens and some heads: each rank gets whole rows of its share of
    the heads, attends within documents as one process would, and hands the tokens of the others
    back. If heads cannot be told apart, or ranks cannot share them equally, each rank gets whole
    rows of all heads, attends as one process would, and keeps its part.
    """
    assert scope.shared is not None
    whole = _with_whole_rows(call, scope, scope.shared)
    output, _ = _backend_of(whole, scope.model.options.backend, own).attend(whole)
    return _parts_of_rows(output, whole, scope.shared, call.query.shape[1]), None


def _with_whole_rows(call: AttentionCall, scope: Scope, rows: RowGroup) -> AttentionCall:
    """Return the call for whole rows, of this rank's heads, or of all if heads cannot be shared.

    Raises `UnsupportedModel` for an option or a mask that may be of the tokens of a part.
    """
    module, heads = call.module, call.query.shape[1]
    options = {name: option for name, option in call.options.items() if name not in _OF_PARTS}
    given = {
        name: option
        for name, option in options.items()
        if isinstance(option, Tensor) and option.dim()
    }
    # sinks have one for each head
    tensors = [name for name, option in given.items() if option.shape != (heads,)]
    all_heads = bool(given) or bool(heads % rows.ranks or call.key.shape[1] % rows.ranks)
    tensors += (
        ["a mask of its own"]
        if call.mask is not None and not isinstance(call.mask, DocumentMask)
        else []
    )
    if tensors:
        raise scope.refused(
            f"{type(module).__name__} hands its attention function {tensors[0]}, which may be of "
            "the tokens of a part"
        )
    query, key, value = (
        rows.whole(each, 2) if all_heads else _exchanged(each, rows) for each in call.states
    )
    return replace(call, query=query, key=key, value=value, options=options)


def _parts_of_rows(output: Tensor, call: AttentionCall, rows: RowGroup, heads: int) -> Tensor:
    """Return this rank's columns, all `heads`, of output (R, whole C, own H, V); or raise."""
    if output.shape[:3] != (call.layout.rows, call.layout.columns, call.query.shape[1]):
        raise UnsupportedModel(
            f"the attention function of {type(call.module).__name__} gave {tuple(output.shape)} "
            f"for whole rows of {call.query.shape[1]} heads, so it does not treat heads alike. "
            "Train it without sequence_parallel.",
            code="sequence-parallel",
        )
    return rows.part(output, 1) if output.shape[2] == heads else _exchanged(output, rows)


def _exchanged(states: Tensor, rows: RowGroup) -> Any:
    """Exchange states among ranks: dimension 1 becomes this rank's share, dimension 2 whole.

    The same exchanges (R, C of whole rows, H of this rank, V) for (R, C of a part, H, V).
    """
    parts = states.unflatten(1, (rows.ranks, -1)).movedim(1, 0)
    return rows.exchange(parts).movedim(0, 2).flatten(2, 3)


def _check_shapes(
    module: nn.Module, scope: Scope, memory: PackedLayout | None, query: Tensor, key: Tensor
) -> None:
    """Raise `UnsupportedModel` unless queries and keys fit the rows and columns of this forward."""
    ran = scope.ran
    of_keys = ran if memory is None else memory.shape
    if tuple(query.shape[::2]) == ran and tuple(key.shape[::2]) == of_keys:
        return
    raise UnsupportedModel(
        f"{type(module).__name__} attends from {query.shape[2]} queries to {key.shape[2]} keys in "
        f"{len(query)} rows, and not from {ran[1]} to {of_keys[1]} in {ran[0]}, as the packed "
        "batch has them on each rank. Prefixes and cross-attention to other states cannot be "
        "packed; run such documents one per row.",
        code="other-tokens" if scope.shared is None else "sequence-parallel",
    )
