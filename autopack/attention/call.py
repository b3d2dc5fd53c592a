"""One call of an attention function inside a packed forward, and what a backend is that is given it.

Shapes here and in what attends: R rows of C columns, H heads (fewer of keys and values where queries share them), E
their size (V that of values), L tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from autopack.layout.prefixes import Prefixes

Output = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a model hands to its attention function, and where the documents lie.

    `query` is (R, H, C, E) in the columns of `layout`; `key` and `value` are in those of `memory`, the layout of the
    encoder's states, where this is cross-attention, and of `layout` otherwise. `original` is the function that the
    model calls, registered as `implementation`. `options` are its further arguments by name, without those that only
    declare documents.
    """

    original: Callable[..., Any]
    implementation: str
    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: DocumentMask | torch.Tensor | None
    layout: PackedLayout
    options: Mapping[str, Any] = field(default_factory=dict)
    memory: PackedLayout | None = None
    want_weights: bool = False

    @property
    def is_causal(self) -> bool:
        """How attention reads a missing mask: the call's `is_causal`, or else the module's."""
        told = self.options.get("is_causal")
        return bool(told if told is not None else getattr(self.module, "is_causal", True))

    @property
    def replaces_sdpa(self) -> bool:
        """Whether the function is one that a user registered in the place of transformers' own for SDPA."""
        return self.implementation == "sdpa" and self.original is not releases.SDPA_FUNCTION

    @property
    def pattern(self) -> Pattern | None:
        """What a token sees of its document, in numbers; None where the mask is not one of the usual ones."""
        if isinstance(self.mask, DocumentMask):
            return None if self.mask.absolute else self.mask.pattern
        return Pattern(causal=self.is_causal) if self.mask is None else None

    def options_beside(self, mask: torch.Tensor | None) -> Mapping[str, Any]:
        """The options with `is_causal` as the model would have said it beside the mask of a document alone.

        gpt2 and others conclude from the presence of a mask that the call need not be causal (up to 4.57); the
        description of a mask is present even where a document alone would have had none.
        """
        if self.options.get("is_causal") is None or not isinstance(self.mask, DocumentMask):
            return self.options
        causal = self.mask.pattern is not None and self.mask.pattern.causal
        return {**self.options, "is_causal": mask is None and causal}

    def refuse_two_directions(self, backend: str) -> None:
        """Raise `UnsupportedModel` where the mask and the module's `is_causal` disagree, and either may be followed.

        transformers leaves a mask out where it takes `is_causal` to say the same: for SDPA, and for functions that
        users register with its masks. Such a model attends one way where there is padding, and the other way where
        there is none. `backend` is the one that was asked for.
        """
        mask, told = self.mask, self.options.get("is_causal")
        if not isinstance(mask, DocumentMask) or mask.pattern is None or told is not None:
            return
        causal = mask.pattern.causal
        if causal == self.is_causal:
            return
        if backend == "sdpa":
            mask = mask.made_by(unpatched(masks.mask_function("sdpa")))
        if mask.for_length(2) is None:
            raise UnsupportedModel(
                f"{type(self.module).__name__} has is_causal={self.is_causal}, but the model makes a "
                f"{'causal' if causal else 'bidirectional'} mask: stock attends by that mask where a batch has "
                f"padding, and by is_causal where it has none. Say the same in model.config.is_causal, or load the "
                f"model with attn_implementation='eager'.",
                code="two-directions",
            )

    def refuse_dense_mask(self, kernel: str) -> None:
        """Raise `UnsupportedModel` where the model made a mask itself, which `kernel` cannot take."""
        if self.mask is not None and not isinstance(self.mask, DocumentMask):
            raise UnsupportedModel(
                f"{type(self.module).__name__} hands {kernel} a mask of its own, of shape {tuple(self.mask.shape)}; "
                f"autopack cannot split it by documents. Load the model with attn_implementation='sdpa' or 'eager'.",
                code="backend-unavailable",
            )


@dataclass(frozen=True)
class Backend:
    """A way to compute attention within the documents of packed rows: `BACKEND` in a module of that name.

    `attend` attends within each document. It returns the output (R, C, H, V), and the attention weights (R, H, C, C),
    zero across documents, where they are wanted and the backend can give them. `availability` says whether the backend
    can be used on this machine, and by what or why not; `refusal` why it cannot serve a call, or None where it can.
    `over_prefixes` attends in a row of S tokens that holds once what several documents begin with, (1, S, H, V), and
    gives None for a call for which it cannot.

    `implementations` are the attn_implementations of transformers whose own backend it is, as far as this machine has
    them; `is_own` tells it of any. `stands_in` maps those that it may serve in place of their own backend to what a
    model's class has to declare for that, or None: only then do both compute the same attention. For those of
    `goes_first` `backend="auto"` takes it wherever it can serve a call. `devices` are the kinds of devices on which
    `auto` may take it; `strict` says that asking for it where it is not available is refused at once.
    """

    name: str
    attend: Callable[[AttentionCall], Output]
    availability: Callable[[], tuple[bool, str]]
    refusal: Callable[[AttentionCall], str | None] = lambda call: None
    over_prefixes: Callable[[AttentionCall, Prefixes], torch.Tensor | None] | None = None
    implementations: Callable[[], tuple[str, ...]] = tuple
    is_own: Callable[[str], bool] = lambda implementation: False
    stands_in: Mapping[str, str | None] = field(default_factory=dict)
    goes_first: frozenset[str] = frozenset()
    devices: frozenset[str] | None = None  # None for all
    strict: bool = False


def unpatched(function: Any) -> Any:
    """A function registered with transformers, without the replacement of autopack's that may stand there."""
    return getattr(function, "autopack_original", function)
