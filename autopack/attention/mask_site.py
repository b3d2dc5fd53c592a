"""The replacements at transformers' mask functions: while a model is enabled, masks of packed rows are described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks
from autopack.layout.packed import PackedLayout
from autopack.patching import Site
from autopack.runtime.scope import Scope, running_scope


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mask function that, for packed rows of enabled models, describes the mask instead of making it."""

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = _packed_scope(kwargs.get("config"))
        if scope is None or scope.layout is None:
            return original(*args, **kwargs)
        if not scope.model.anatomy.attention:
            # This model attends in code of its own and wants tensors. The replacement stands here for another model.
            return original(*args, **kwargs)
        if args:
            raise SiteDrift(f"{site} is called by position inside a packed forward; autopack needs names")
        _check_padding(kwargs)
        layout = _of_keys(scope.layout, scope.memory, kwargs)
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


def adapt_preprocessing(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Keep transformers from looking for packed rows by itself, where autopack has done so already.

    That saves a device sync per mask and leaves the mask function as the model composed it.
    """
    names = masks.masking_function_parameters()

    def autopack_preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if _packed_scope(given.get("config")) is None:
            return original(*args, **kwargs)
        mask = given.get("attention_mask")
        if not isinstance(mask, DocumentMask):
            return original(**{**given, "position_ids": None})
        # The model made it before it called its backbone. A 4-D mask is taken as it is, and handed back.
        stand_in = torch.empty(1, 1, 1, 1)
        found = original(**{**given, "attention_mask": stand_in})
        return tuple(mask if part is stand_in else part for part in found)

    return autopack_preprocess_mask_arguments


def _packed_scope(config: Any) -> Scope | None:
    """The scope of the packed forward that is running, where the config is one of its model's."""
    scope = running_scope()
    if scope is None or scope.layout is None or not scope.model.anatomy.owns_config(config):
        return None
    return scope


def _of_keys(layout: PackedLayout, memory: PackedLayout | None, arguments: dict[str, Any]) -> PackedLayout:
    """The layout of a mask's keys: that of the encoder's states if it is one for cross-attention, which hides none."""
    if memory is None or arguments["kv_length"] != memory.columns:
        return layout
    return memory if masks.describe_mask(arguments["mask_function"]) == masks.Pattern(causal=False) else layout


def _check_padding(arguments: dict[str, Any]) -> None:
    """Some models make an all-ones mask of their own; padding that the entry has not seen would be lost."""
    padding = arguments.get("attention_mask")
    if padding is None:
        return
    if not bool(padding.all()):
        raise UnsupportedModel("the model makes a padding mask of its own inside a packed forward")
    arguments["attention_mask"] = None


def _insists_on_tensor(arguments: dict[str, Any]) -> bool:
    """Whether the caller wants a tensor in any case: it refuses both skips although the rule is a plain one.

    A rule with a custom part, which is vmapped, refuses the skips by itself.
    """
    skips = arguments.get("allow_is_causal_skip", True) or arguments.get("allow_is_bidirectional_skip", False)
    if skips or arguments.get("use_vmap", False):
        return False
    return masks.describe_mask(arguments["mask_function"]) is not None
