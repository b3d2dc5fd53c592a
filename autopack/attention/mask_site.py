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
from autopack.runtime.scope import Scope, current


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mask function that, for packed rows of enabled models, describes the mask instead of making it."""

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = _packed_scope(kwargs.get("config"))
        if scope is None or scope.layout is None or not _reads_descriptions(scope):
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
    scope = current()
    if scope is None or scope.layout is None or not scope.owner.owns_config(config):
        return None
    return scope


def _reads_descriptions(scope: Scope) -> bool:
    """Whether the model attends through transformers' interface, where autopack takes descriptions of masks.

    One that attends in code of its own meets the replacement too, while another model is enabled, and wants tensors.
    """
    return bool(scope.owner.attention)


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
    """Whether the caller wants a tensor in any case: it refuses both skips although the rule is a plain one.

    A rule with a custom part, which is vmapped, refuses the skips by itself.
    """
    skips = arguments.get("allow_is_causal_skip", True) or arguments.get("allow_is_bidirectional_skip", False)
    if skips or arguments.get("use_vmap", False):
        return False
    return masks.describe_mask(arguments["mask_function"]) is not None
