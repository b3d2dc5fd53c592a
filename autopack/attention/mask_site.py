"""The replacements at transformers' mask functions: while a model is enabled, masks of packed rows are described."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks, releases, torches
from autopack.layout.prefixes import Prefixes
from autopack.patching import Site
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import Scope, running_scope


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """A mask function that, for packed rows of enabled models, describes the mask instead of making it."""

    if releases.is_own(original):
        site.check_takes(original, masks.READ)

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = _packed_scope(kwargs.get("config"))
        # A model without such attention attends in code of its own and wants tensors; the site stands for another's.
        if scope is None or scope.layout is None:
            return original(*args, **kwargs)
        if not scope.model.anatomy.attention:
            if scope.shared is not None and not args:
                kwargs = _of_whole_rows(kwargs, masks.describe_mask(kwargs["mask_function"]), scope)
            return original(*args, **kwargs)
        if args:
            raise SiteDrift(
                f"{site} is called by position inside a packed forward; autopack needs names. Run `autopack doctor` to "
                f"see which versions are supported."
            )
        # Some models make an all-ones mask of their own; padding that the entry has not seen would be lost.
        padding = kwargs.get("attention_mask")
        if padding is not None:
            _refuse_padding(padding, scope.model)
        kwargs["attention_mask"] = None
        pattern, layout, memory = masks.describe_mask(kwargs["mask_function"]), scope.layout, scope.memory
        if scope.shared is not None:
            kwargs = _of_whole_rows(kwargs, pattern, scope)
        if scope.prefixes is not None:
            kwargs = _of_documents(kwargs, scope.prefixes)
        if memory is not None and kwargs["kv_length"] == memory.shape[1]:
            # Of cross-attention, which hides no state of the encoder, or whose rule is asked whether it does.
            across = pattern == masks.Pattern(causal=False) or memory.shape[1] != layout.shape[1]
            layout = memory if across else layout
        if (kwargs["batch_size"], kwargs["kv_length"]) != layout.shape:
            raise UnsupportedModel(
                f"the model asks for a mask over {kwargs['kv_length']} keys in {kwargs['batch_size']} rows, but the "
                f"packed batch has {scope.layout.rows} rows of {scope.layout.columns} tokens. Cross-attention and "
                f"prefixes cannot be packed; run such documents one per row."
            )
        mask = DocumentMask(layout, original, kwargs)
        # Code that wants a tensor in any case, and refuses both skips although the rule is a plain one, goes on to
        # combine it with another mask, so it gets the whole one. A rule with a custom part, which is vmapped, refuses
        # the skips by itself; BlockMasks cannot be combined.
        skips = kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip", False)
        combined = not skips and not kwargs.get("use_vmap", False) and pattern is not None
        if not combined or site.key == "flex_attention":
            return mask
        if scope.shared is not None:
            raise UnsupportedModel(
                "the model combines its masks by code of its own, of which a rank that has a part of each row would "
                "get whole rows. Train it without sequence_parallel."
            )
        if scope.prefixes is not None:
            raise UnsupportedModel(
                "the model combines its masks by code of its own, which cannot be done for a row that holds once what "
                "rows of the batch begin with. Use autopack.enable(model, share='never')."
            )
        return mask.over_rows

    return autopack_mask


def adapt_preprocessing(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Keep transformers from looking for packed rows by itself, where autopack has done so already.

    That saves a device sync per mask and leaves the mask function as the model composed it.
    """
    names = list(inspect.signature(original).parameters)

    def autopack_preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        given = {**torches.by_name(names, args), **kwargs}
        if _packed_scope(given.get("config")) is None:
            return original(*args, **kwargs)
        mask = given.get("attention_mask")
        if not isinstance(mask, DocumentMask):
            return original(**{**given, "position_ids": None})
        # The model made it before it called its backbone. A 4-D mask is taken as it is, and handed back.
        given["attention_mask"] = torch.empty(1, 1, 1, 1)
        return tuple(mask if part is given["attention_mask"] else part for part in original(**given))

    return autopack_preprocess_mask_arguments


def _of_whole_rows(arguments: dict[str, Any], pattern: Any, scope: Scope) -> dict[str, Any]:
    """The arguments of a mask function for whole rows, where this rank has a part of their columns."""
    layout, rows, padding = scope.layout, scope.shared, arguments.get("attention_mask")
    assert layout is not None
    assert rows is not None
    if padding is not None:
        _refuse_padding(padding, scope.model)
        arguments = {**arguments, "attention_mask": padding.new_ones(layout.shape)}
    asked, part = (arguments["batch_size"], arguments["kv_length"]), (layout.rows, layout.columns // rows.ranks)
    if asked != part or (pattern is None and masks.captured_tensors(arguments["mask_function"])):
        raise UnsupportedModel(
            f"the model asks for a mask over {asked[1]} keys in {asked[0]} rows, or by a rule of single tokens, but "
            f"this rank has {part[1]} columns of {part[0]} rows that it shares with others. Train the model without "
            f"sequence_parallel."
        )
    return arguments | masks.length_arguments(layout.columns, layout.device)


def _of_documents(arguments: dict[str, Any], prefixes: Prefixes) -> dict[str, Any]:
    """The arguments of a mask function for documents, where the row that runs holds once what they begin with."""
    asked, ran, columns = (arguments["batch_size"], arguments["kv_length"]), (1, prefixes.tokens), len(prefixes.columns)
    if asked != ran:
        raise UnsupportedModel(
            f"the model asks for a mask over {asked[1]} keys in {asked[0]} rows, where a row of {ran[1]} tokens holds "
            f"once what rows of the batch begin with. Use autopack.enable(model, share='never')."
        )
    return arguments | masks.length_arguments(columns, prefixes.device)


def _refuse_padding(mask: torch.Tensor, model: EnabledModel) -> None:
    why = "the model makes a padding mask of its own inside a packed forward; train it on padded batches"
    if torch.compiler.is_compiling() or not (mask.device.type == "cpu" or model.is_settling):
        # What was proven makes none, and to read that on the host would wait for the device, or break a graph.
        torch._assert_async(mask.all(), why)
    elif not mask.all():
        raise UnsupportedModel(why)


def _packed_scope(config: Any) -> Scope | None:
    """The scope of the packed forward that is running, where the config is one of its model's."""
    scope = running_scope()
    packed = scope is not None and scope.layout is not None and scope.model.anatomy.owns_config(config)
    return scope if packed else None
