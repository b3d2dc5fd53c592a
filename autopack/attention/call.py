"""A call of an attention function inside a packed forward, and the backends that can compute it.

Shapes, here and in backends: R rows of C columns, H heads (fewer of keys and values if queries
share them), E their size (V of values), L tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import releases, torches
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes

Output = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a model's attention function in a packed forward, with its documents' places.

    `query` is (R, H, C, E) in the columns of `layout`. `key` and `value` are in the columns of
    `memory`, if it is given (states of an encoder, or documents up to each query), or of `layout`.
    `original` is the function that the model calls, registered as `implementation`. `options` are
    its further arguments by name, without those that only declare documents.
    """

    original: Callable[..., Any]
    implementation: str
    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: DocumentMask | Tensor | None
    layout: PackedLayout
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: PackedLayout | None = None
    want_weights: bool = False

    @property
    def keys(self) -> PackedLayout:
        """The layout of keys and values."""
        return self.layout if self.memory is None else self.memory

    @property
    def is_causal(self) -> bool:
        """True if a missing mask means causal attention, by the call's option or the module."""
        told = self.options.get("is_causal")
        return bool(told if told is not None else getattr(self.module, "is_causal", True))

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (R, H, C, E) each."""
        return self.query, self.key, self.value

    def states_for_sdpa(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the dtype to which SDPA casts them under autocast."""
        query, key, value = (each.to(torches.taken_by_sdpa(each)) for each in self.states)
        return query, key, value

    @property
    def replaces_sdpa(self) -> bool:
        """True if the user registered another function under transformers' name "sdpa"."""
        return self.implementation == "sdpa" and self.original is not releases.SDPA_FUNCTION

    @property
    def pattern(self) -> Pattern | None:
        """The tokens of its document that a token sees, or None if the mask has no known rule."""
        if isinstance(self.mask, DocumentMask):
            return None if self.mask.absolute else self.mask.pattern
        return Pattern(causal=self.is_causal) if self.mask is None else None

    def options_beside(self, mask: Tensor | None) -> Mapping[str, Any]:
        """Return the options with the `is_causal` that fits `mask`, the mask of one document.

        gpt2 and others conclude from the presence of a mask that the call need not be causal (up to
        4.57); the description of a mask is present even if a document alone would have none.
        """
        if self.options.get("is_causal") is None or not isinstance(self.mask, DocumentMask):
            return self.options
        causal = self.mask.pattern is not None and self.mask.pattern.causal
        return {**self.options, "is_causal": mask is None and causal}

    def refuse_two_directions(self) -> None:
        """Raise `UnsupportedModel` if mask and `is_causal` differ and stock may follow either.

        transformers leaves a mask out if it takes `is_causal` to express the same: for SDPA, and
        for functions that the user registers with its masks. Such a model attends one way with
        padding, and the other way without.
        """
        mask, told = self.mask, self.options.get("is_causal")
        if not isinstance(mask, DocumentMask) or mask.pattern is None or told is not None:
            return
        causal = mask.pattern.causal
        if causal == self.is_causal:
            return
        if mask.for_length(2) is None:
            raise UnsupportedModel(
                f"{type(self.module).__name__} has is_causal={self.is_causal}, but the model makes "
                f"a {'causal' if causal else 'bidirectional'} mask: stock attends by that mask "
                "where a batch has padding, and by is_causal where it has none. Say the same in "
                "model.config.is_causal, or load the model with attn_implementation='eager'.",
                code="two-directions",
            )

    def refuse_dense_mask(self, kernel: str) -> None:
        """Raise `UnsupportedModel` if the model made a mask itself, which `kernel` cannot take."""
        if self.mask is not None and not isinstance(self.mask, DocumentMask):
            raise UnsupportedModel(
                f"{type(self.module).__name__} hands {kernel} a mask of its own, of shape "
                f"{tuple(self.mask.shape)}; autopack cannot split it by documents. Load the model "
                "with attn_implementation='sdpa' or 'eager'.",
                code="backend-unavailable",
            )


@dataclass(frozen=True)
class Backend:
    """A way to compute attention within documents of packed rows: `name`.

    * `attend` attends within each document. It returns the output (R, C, H, V), and the attention
      weights (R, H, C, C), zero across documents, if they are wanted and the backend can give them.
    * `availability` tells whether the backend can be used on this machine, and by what or why not.
    * `refusal` returns why it cannot serve a call, or None.
    * `over_prefixes` attends in a row of S tokens that holds common beginnings of documents once,
      (1, S, H, V); it returns None for a call that it cannot serve.
    * For implementations of `stands_in`, `backend="auto"` takes it in place of their own backend
      whenever it can serve a call. Asking for it where it is not available is refused at once.
    * `devices` are the kinds of devices on which it runs.
    """

    name: str
    attend: Callable[[AttentionCall], Output]
    availability: Callable[[], tuple[bool, str]]
    refusal: Callable[[AttentionCall], str | None] = lambda call: None
    over_prefixes: Callable[[AttentionCall, Prefixes], Tensor | None] | None = None
    stands_in: frozenset[str] = frozenset()
    devices: frozenset[str] | None = None  # None for all
