"""What an enabled model's masks become on packed rows: a description, from which each backend takes what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from autopack.errors import UnsupportedModel
from autopack.inspection import masks
from autopack.layout.packed import PackedLayout


class DocumentMask:
    """Stands where the model's attention mask would stand, on its way from the mask function to the attention site.

    No tensor over the whole row is made. `function` is the upstream mask function that would have been called with
    `arguments`; calling it for the length of one document gives the very mask that the document has alone.
    """

    def __init__(self, layout: PackedLayout, function: Callable[..., Any], arguments: Mapping[str, Any]):
        self.layout = layout
        self.function = function
        self.arguments = dict(arguments)
        self.rule: Callable[..., Any] = arguments["mask_function"]
        """The index-based rule (batch, head, query, key) -> visible, as the model's code composed it."""
        self.pattern = masks.describe_mask(self.rule)
        """The rule in numbers, or None where it is not one of the usual ones."""
        tensors = masks.captured_tensors(self.rule) if self.pattern is None else ()
        self.absolute = any(t.dim() >= 2 and t.shape[-1] >= layout.shape[1] for t in tensors)
        """Whether the rule reads per-token tensors, so that it must be asked with columns of the row."""
        skips = {"allow_is_causal_skip", "allow_is_bidirectional_skip"} & arguments.keys()
        self._no_skips = dict.fromkeys(skips, False)
        self._made: dict[Any, Any] = {}  # masks by the length of a document, descriptions by their function

    def for_document(self, row: int, first: int, end: int) -> Any:
        """The mask of one document alone: (1, 1, length, length), or None where the model would have passed none."""
        if self.absolute:
            return self._by_columns(row, first, end)
        length = end - first
        local = self.arguments.get("local_size")
        if local is not None and length <= local:
            return self.for_length(length)
        # A rule over relative indices is the same for every length, so one mask serves all documents.
        longest = self.for_length(self.layout.max_seqlen)
        if isinstance(longest, torch.Tensor):
            return longest[:, :, :length, :length]
        # A BlockMask forgets its rule when it is sliced, so it is made for each length.
        return None if longest is None else self.for_length(length)

    def for_length(self, length: int) -> Any:
        """The mask of a document of so many tokens alone, by a rule that is the same for all documents."""
        if length not in self._made:
            self._made[length] = self.function(**masks.with_length(self.arguments, length))
        return self._made[length]

    def for_last(self, tokens: int, length: int) -> torch.Tensor | None:
        """What the last `tokens` of a document of `length` tokens see of it: (1, 1, tokens, length).

        None where the mask function makes no tensor, or the rule reads columns of the row.
        """
        if self.absolute:
            return None
        key = "whole", max(length, self.layout.max_seqlen)
        if key not in self._made:
            self._made[key] = self.function(**{**masks.with_length(self.arguments, key[1]), **self._no_skips})
        whole = self._made[key]
        return whole[:, :, length - tokens : length, :length] if isinstance(whole, torch.Tensor) else None

    def _by_columns(self, row: int, first: int, end: int) -> torch.Tensor | None:
        if any(part.chunk is not None for part in masks.known_parts(self.rule)):
            raise UnsupportedModel(
                "this model combines chunked attention with per-token blocks (images in chunks); autopack cannot yet "
                "give a packed document the chunks that it would have alone. Run such documents one per row."
            )
        rule, arguments = self.rule, masks.with_length(self.arguments, end - first)
        arguments["mask_function"] = lambda b, h, q, k: rule(b + row, h, q + first, k + first)
        return self.function(**arguments)

    @cached_property
    def over_rows(self) -> Any:
        """What the upstream function makes of the rule within documents: a BlockMask, or a dense mask of whole rows."""
        rule, number, start = self.rule, self.layout.seq_idx, self.layout.start_columns
        if self.absolute:
            start = torch.zeros_like(start)

        def packed_rule(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (number[b, q] == number[b, k]) & rule(b, h, q - start[b, q], k - start[b, k])

        return self.function(**{**self.arguments, **self._no_skips, "mask_function": packed_rule})

    def __getitem__(self, index: Any) -> Any:
        """Slicing of a mask by model code: what keeps all of it is this mask, anything else the dense one."""
        kept = index if isinstance(index, tuple) else (index,)
        size = self.layout.columns
        if all(isinstance(part, slice) and part.indices(size) == (0, size, 1) for part in kept):
            return self
        return self.over_rows[index]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The dense mask over whole rows, converted: what model code wants that computes with its mask."""
        return self.over_rows.to(*args, **kwargs)

    def masked_fill(self, *args: Any, **kwargs: Any) -> Any:
        """The dense mask over whole rows with more hidden: what model code does that hides tokens of its own."""
        return self.over_rows.masked_fill(*args, **kwargs)

    def dim(self) -> int:
        """The number of axes that the dense mask has, which model code tells masks of pairs by."""
        return 4

    def made_by(self, function: Callable[..., Any]) -> DocumentMask:
        """The same rule for another backend's mask function."""
        if function is self.function:
            return self
        if function not in self._made:
            self._made[function] = DocumentMask(self.layout, function, self.arguments)
        return self._made[function]
