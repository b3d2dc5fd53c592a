"""The replacements that stand at transformers' attention and mask functions while a model is enabled.

Both are inert outside a packed forward of an enabled model: they hand the call on as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack import upstream
from autopack.attention import choose as choosing
from autopack.attention.across import attend_across
from autopack.attention.compiled import attend_compiled
from autopack.attention.documents import attend_documents
from autopack.attention.flash import attend_flash
from autopack.attention.flex import attend_flex
from autopack.attention.mask import DocumentMask
from autopack.attention.varlen import attend_varlen
from autopack.delivery import ACROSS, Scope, current, site_scope
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.layout import PackedLayout
from autopack.patching import Site

__all__ = ["adapt_attention", "adapt_mask", "adapt_preprocessing"]


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
    layout, memory = scope.layout, scope.memory if ACROSS in module.__dict__ else None
    assert layout is not None
    _check_shapes(module, layout, memory or layout, query, key)
    if query.device != layout.device:
        layout = layout.to(query.device)
    if memory is not None:
        memory = memory.to(query.device)
        return _attend_across(original, implementation, layout, memory, module, query, key, value, mask, options)
    adjust = _adjustment(scope, module)
    if adjust is not None:
        query, key, value, options = adjust(module, layout, query, key, value, options)
    backend = choosing.choose(scope.owner.backend, implementation, module, query, value, mask, options)
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


def _adjustment(scope: Scope, module: torch.nn.Module) -> Callable[..., Any] | None:
    adjustments = scope.owner.adjustments
    if not adjustments:
        return None
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from theirs.
    return next((adjustments[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in adjustments), None)


# Lengths on the host would be constants of a compiled graph, and every layout a graph of its own.
_attend_documents = torch._dynamo.disable(attend_documents)
_attend_across = torch._dynamo.disable(attend_across)


def _registered(implementation: str) -> Callable[..., Any]:
    function = upstream.attention_function(implementation)
    return getattr(function, "autopack_original", function)  # type: ignore[return-value]


def _registered_mask(implementation: str) -> Callable[..., Any]:
    function = upstream.mask_function(implementation)
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


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mask function that, for packed rows of enabled models, describes the mask instead of making it."""

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is None or scope.layout is None or not scope.owner.owns_config(kwargs.get("config")):
            return original(*args, **kwargs)
        if not scope.owner.attention:  # it stands here for another model; this one cuts its masks by itself
            return original(*args, **kwargs)
        if args:
            raise SiteDrift(f"{site} is called by position inside a packed forward; autopack needs names")
        _check_padding(kwargs)
        layout = scope.layout
        if scope.memory is not None and _is_of_memory(kwargs, scope.memory):
            layout = scope.memory
        if kwargs["batch_size"] != layout.rows or kwargs["kv_length"] != layout.columns:
            raise UnsupportedModel(
                f"the model asks for a mask over {kwargs['kv_length']} keys in {kwargs['batch_size']} rows, but the "
                f"packed batch has {scope.layout.rows} rows of {scope.layout.columns} tokens. Cross-attention and "
                f"prefixes cannot be packed; run such documents one per row."
            )
        mask = DocumentMask(layout, original, kwargs)
        # Code that insists on a tensor goes on to combine it with another mask, so it gets the whole one. BlockMasks
        # cannot be combined.
        return mask.over_rows if _insists_on_tensor(kwargs) and site.key != "flex_attention" else mask

    autopack_mask.autopack_original = original  # type: ignore[attr-defined]
    return autopack_mask


def _is_of_memory(arguments: dict[str, Any], memory: PackedLayout) -> bool:
    """Whether a mask is asked for cross-attention: no token of the encoder is hidden from the decoder."""
    pattern = upstream.describe_mask(arguments["mask_function"])
    return pattern == upstream.Pattern(causal=False) and arguments["kv_length"] == memory.columns


def _check_padding(arguments: dict[str, Any]) -> None:
    """Some models make an all-ones mask of their own; padding that the entry has not seen would be lost."""
    padding = arguments.get("attention_mask")
    if padding is None:
        return
    if not bool(padding.all()):
        raise UnsupportedModel("the model makes a padding mask of its own inside a packed forward")
    arguments["attention_mask"] = None


def _insists_on_tensor(arguments: dict[str, Any]) -> bool:
    """Both skips are refused although the rule is a plain one: the caller wants a tensor whatever it says."""
    if arguments.get("allow_is_causal_skip", True) or arguments.get("allow_is_bidirectional_skip", False):
        return False
    if arguments.get("use_vmap", False):
        return False  # a rule with a custom part refuses the skips by itself
    return upstream.describe_mask(arguments["mask_function"]) is not None


def adapt_preprocessing(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Keep transformers from looking for packed rows by itself, where autopack has done so already.

    That saves a device sync per mask and leaves the mask function as the model composed it.
    """
    parameters = upstream.masking_function_parameters()
    place, of_mask = parameters.index("position_ids"), parameters.index("attention_mask")

    def autopack_preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        scope = current()
        if scope is None or scope.layout is None:
            return original(*args, **kwargs)
        config = kwargs.get("config", args[0] if args else None)
        if not scope.owner.owns_config(config):
            return original(*args, **kwargs)
        mask = kwargs.get("attention_mask", args[of_mask] if len(args) > of_mask else None)
        if isinstance(mask, DocumentMask):  # the model made it before the backbone: it is taken as a 4-D mask is
            return _as_prepared(original, mask, args, kwargs, of_mask)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = None
        elif len(args) > place:
            args = (*args[:place], None, *args[place + 1 :])
        return original(*args, **kwargs)

    return autopack_preprocess_mask_arguments


def _as_prepared(
    original: Callable[..., Any], mask: DocumentMask, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> Any:
    stand_in = torch.empty(1, 1, 1, 1)
    if "attention_mask" in kwargs:
        found = original(*args, **{**kwargs, "attention_mask": stand_in})
    else:
        found = original(*args[:place], stand_in, *args[place + 1 :], **kwargs)
    return tuple(mask if part is stand_in else part for part in found)
