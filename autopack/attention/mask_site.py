"""Stand-ins at transformers' mask functions: while a model is enabled, masks of packed rows are described, not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks
from autopack.layout.packed import PackedLayout
from autopack.patching import Site
from autopack.runtime.scope import running_scope


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mask function that, for packed rows of enabled models, describes the mask instead of making it."""

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = running_scope()
        if scope is None or scope.layout is None or not scope.model.anatomy.owns_config(kwargs.get("config")):
            return original(*args, **kwargs)
        if not scope.model.anatomy.attention:  # it stands here for another model; this one cuts its masks by itself
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
    pattern = masks.describe_mask(arguments["mask_function"])
    return pattern == masks.Pattern(causal=False) and arguments["kv_length"] == memory.columns


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
    return masks.describe_mask(arguments["mask_function"]) is not None


def adapt_preprocessing(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Keep transformers from looking for packed rows by itself, where autopack has done so already.

    That saves a device sync per mask and leaves the mask function as the model composed it.
    """
    parameters = masks.masking_function_parameters()
    place, of_mask = parameters.index("position_ids"), parameters.index("attention_mask")

    def autopack_preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        scope = running_scope()
        if scope is None or scope.layout is None:
            return original(*args, **kwargs)
        config = kwargs.get("config", args[0] if args else None)
        if not scope.model.anatomy.owns_config(config):
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
