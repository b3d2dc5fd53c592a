"""Descriptions in the place of an enabled model's masks on packed rows, made at transformers' mask
functions.

Each backend takes from a description what it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopack.errors import SiteDrift, UnsupportedModel
from autopack.inspection import masks, releases, torches
from autopack.layout.packed import PackedLayout
from autopack.patching import Site
from autopack.runtime.model import EnabledModel
from autopack.runtime.scope import Scope, running_scope


class DocumentMask:
    """Description of an attention mask that the attention site gets in place of a tensor.

    No tensor over the whole row is made. `function` is the upstream mask function that would have
    been called with `arguments`; called for the length of one document, it gives the very mask that
    the document has alone. `pattern` is its rule in numbers, or None if it is not a usual one.
    """

    # No dataclass: FSDP2 makes new ones of those, with cast tensors, on their way to a layer.
    def __init__(
        self,
        layout: PackedLayout,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        pattern: masks.Pattern | None,
    ):
        self.layout, self.function = layout, function
        self.arguments, self.pattern = arguments, pattern
        self.rule: Callable[..., Any] = arguments["mask_function"]
        """Index-based rule (batch, head, query, key) -> visible, as the model's code composed
        it."""
        self.absolute = pattern is None and any(
            tensor.dim() >= 2 and tensor.shape[-1] >= layout.shape[1]
            for tensor in masks.captured_tensors(self.rule)
        )
        """True if the rule reads per-token tensors, so that it must be asked with columns of the
        row."""
        self._no_skips = dict.fromkeys(
            {"allow_is_causal_skip", "allow_is_bidirectional_skip"} & arguments.keys(), False
        )
        self._made: dict[Any, Any] = {}  # masks by the length of a document, and answers

    def for_document(self, row: int, first: int, end: int) -> Any:
        """Return one document's mask (1, 1, length, length); None if stock makes none."""
        if self.absolute:
            return self._by_columns(row, first, end)
        length = end - first
        local = self.arguments.get("local_size")
        if local is not None and length <= local:
            return self.for_length(length)
        # A rule over relative indices is the same for every length, so one mask serves all
        # documents.
        longest = self.for_length(self.layout.max_seqlen)
        if isinstance(longest, Tensor):
            return longest[:, :, :length, :length]
        # A BlockMask forgets its rule when it is sliced, so it is made for each length.
        return None if longest is None else self.for_length(length)

    def for_length(self, length: int, skips: bool = True) -> Any:
        """Return the mask of any document of this length, cached; the rule must be relative.

        Without `skips` it is made even if stock could do without.
        """
        if (length, skips) not in self._made:
            others = {} if skips else self._no_skips
            self._made[length, skips] = self.function(**self._arguments_alone(length) | others)
        return self._made[length, skips]

    def for_last(self, tokens: int, length: int) -> Tensor | None:
        """Return the (1, 1, tokens, length) mask of the last `tokens` of `length`, or None.

        None if the mask function makes no tensor, or the rule reads columns of the row.
        """
        if self.absolute:
            return None
        whole = self.for_length(max(length, self.layout.max_seqlen), skips=False)
        return whole[:, :, length - tokens : length, :length] if isinstance(whole, Tensor) else None

    def sees_all(self, layout: PackedLayout, memory: PackedLayout) -> bool:
        """Return True if the rule lets every token of `layout` see all of `memory`; cached."""
        key = "all", layout.columns, memory.columns
        if key not in self._made:
            ours, theirs = (
                torch.arange(each.columns, device=layout.device) for each in (layout, memory)
            )
            zero = ours.new_zeros(())
            self._made[key] = bool(self.rule(zero, zero, ours[:, None], theirs[None]).all())
        return self._made[key]

    def _arguments_alone(self, length: int) -> dict[str, Any]:
        """Return the mask function's arguments for one unpadded document of this length."""
        return masks.with_length(self.arguments, length, batch_size=1, attention_mask=None)

    def _by_columns(self, row: int, first: int, end: int) -> Tensor | None:
        """Return one document's mask by a rule that reads columns; raise if it has chunks too."""
        if any(part.chunk is not None for part in masks.known_parts(self.rule)):
            raise UnsupportedModel(
                "this model combines chunked attention with per-token blocks (images in chunks); "
                "autopack cannot yet give a packed document the chunks that it would have alone. "
                "Run such documents one per row.",
                code="attention-unknown",
            )
        rule, arguments = self.rule, self._arguments_alone(end - first)
        arguments["mask_function"] = lambda b, h, q, k: rule(b + row, h, q + first, k + first)
        return self.function(**arguments)

    @cached_property
    def over_rows(self) -> Any:
        """The mask of whole rows that keeps documents apart: a BlockMask, or a dense tensor."""
        rule, number, start = self.rule, self.layout.seq_idx, self.layout.start_columns
        if self.absolute:
            start = torch.zeros_like(start)

        def packed_rule(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (number[b, q] == number[b, k]) & rule(b, h, q - start[b, q], k - start[b, k])

        return self.function(**{**self.arguments, **self._no_skips, "mask_function": packed_rule})

    def __getitem__(self, index: Any) -> Any:
        """Return this mask if slices keep all of it; else the dense mask at `index`."""
        kept = index if isinstance(index, tuple) else (index,)
        size = self.layout.columns
        if all(isinstance(part, slice) and part.indices(size) == (0, size, 1) for part in kept):
            return self
        return self.over_rows[index]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the dense mask over whole rows, converted, for models that compute with masks."""
        return self.over_rows.to(*args, **kwargs)

    def masked_fill(self, *args: Any, **kwargs: Any) -> Any:
        """Return the dense mask over whole rows, filled, for models that hide tokens themselves."""
        return self.over_rows.masked_fill(*args, **kwargs)

    def dim(self) -> int:
        """Return 4, the dense mask's number of axes, by which models know masks of pairs."""
        return 4


def adapt_mask(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a mask function that gives packed rows a `DocumentMask`, and calls `original` else."""

    if releases.is_of_transformers(original):
        site.check_takes(original, masks.READ)

    def autopack_mask(*args: Any, **kwargs: Any) -> Any:
        scope = _packed_scope(kwargs.get("config"))
        # A model without such attention attends in code of its own and wants tensors; the site
        # stands for another's.
        attends = scope is not None and scope.model.anatomy.attention
        if scope is None or (not attends and (args or scope.shared is None)):
            return original(*args, **kwargs)
        if args:
            raise SiteDrift(
                f"{site} is called by position inside a packed forward; autopack needs names. Run "
                "`autopack doctor` to see which versions are supported.",
                code="site-drift",
            )
        # Some models make an all-ones mask of their own; padding that the entry has not seen would
        # be lost.
        if (padding := kwargs.get("attention_mask")) is not None:
            _refuse_padding(padding, scope.model)
        pattern = masks.describe_mask(kwargs["mask_function"])
        whole: Any = scope.layout
        layout, memory = whole, scope.memory
        in_part = scope.shared is not None or scope.prefixes is not None
        if in_part:
            kwargs = _arguments_of_whole_rows(kwargs, pattern, scope)
        if not attends:
            seen = None if padding is None else padding.new_ones(whole.shape)
            return original(**{**kwargs, "attention_mask": seen})
        kwargs["attention_mask"] = None
        if memory is not None and kwargs["kv_length"] == memory.shape[1]:
            # Of cross-attention, which hides no state of the encoder, or whose rule is asked
            # whether it does.
            across = pattern == masks.Pattern(causal=False) or memory.shape[1] != layout.shape[1]
            layout = memory if across else layout
        if (kwargs["batch_size"], kwargs["kv_length"]) != layout.shape:
            raise UnsupportedModel(
                f"the model asks for a mask over {kwargs['kv_length']} keys in "
                f"{kwargs['batch_size']} rows, but the packed batch has {whole.rows} rows of "
                f"{whole.columns} tokens. Cross-attention and prefixes cannot be packed; "
                "run such documents one per row.",
                code="other-tokens",
            )
        mask = DocumentMask(layout, original, kwargs, pattern)
        # Code that wants a tensor in any case, and refuses both skips although the rule is a plain
        # one, goes on to combine it with another mask, so it gets the whole one. A rule with a
        # custom part, which is vmapped, refuses the skips by itself; BlockMasks cannot be combined.
        skips = kwargs.get("allow_is_causal_skip", True) or kwargs.get(
            "allow_is_bidirectional_skip", False
        )
        combined = not skips and not kwargs.get("use_vmap", False) and pattern is not None
        if not combined or site.key == "flex_attention":
            return mask
        if in_part:
            raise scope.refused("the model combines its masks by code of its own")
        return mask.over_rows

    return autopack_mask


def adapt_preprocessing(original: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Return a mask preprocessing that leaves out transformers' search for packed rows.

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
        # The model made it before it called its backbone. A 4-D mask is taken as it is, and handed
        # back.
        given["attention_mask"] = torch.empty(1, 1, 1, 1)
        return tuple(
            mask if part is given["attention_mask"] else part for part in original(**given)
        )

    return autopack_preprocess_mask_arguments


def _arguments_of_whole_rows(
    arguments: dict[str, Any], pattern: Any, scope: Scope
) -> dict[str, Any]:
    """Return a mask function's arguments for whole rows, given a part's; raise if they misfit."""
    asked, layout = (arguments["batch_size"], arguments["kv_length"]), scope.layout
    by_tokens = scope.shared is not None and pattern is None
    if asked != scope.ran or (by_tokens and masks.captured_tensors(arguments["mask_function"])):
        raise scope.refused(
            f"the model asks for a mask over {asked[1]} keys in {asked[0]} rows, or by a rule of "
            f"single tokens, beside {scope.ran[1]} columns of {scope.ran[0]} rows"
        )
    assert layout is not None
    return masks.with_length(arguments, layout.columns)


def _refuse_padding(mask: Tensor, model: EnabledModel) -> None:
    """Raise `UnsupportedModel` if a mask that the model made itself hides tokens."""
    why = (
        "the model makes a padding mask of its own inside a packed forward; train it on padded "
        "batches"
    )
    if torch.compiler.is_compiling() or not (mask.device.type == "cpu" or model.is_settling):
        # What was proven makes none, and to read that on the host would wait for the device, or
        # break a graph.
        torch._assert_async(mask.all(), why)
    elif not mask.all():
        raise UnsupportedModel(why, code="attention-unknown")


def _packed_scope(config: Any) -> Scope | None:
    """Return the running packed forward's scope if its model reads `config`; else None."""
    scope = running_scope()
    if scope is None or scope.layout is None:
        return None
    for own in scope.model.anatomy.configs:
        # Configs of single layers are made anew whenever they are asked for, so they have no
        # identity.
        if config is own or (type(config) is type(own) and getattr(own, "is_heterogeneous", False)):
            return scope
    return None
