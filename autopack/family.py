"""What is said of architectures: `autopack.architectures` has one frozen `Family` for each way of serving them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopack.errors import UnsupportedModel
from autopack.inspection.positions import AFTER_PAD_TOKEN as AFTER_PAD_TOKEN
from autopack.inspection.positions import Numbering
from autopack.layout.batches import Spread, spread_tokens
from autopack.layout.packed import PackedLayout
from autopack.layout.ways import CACHES
from autopack.patching import Site

DERIVED: Any = ...
"""In a tiny configuration: the field is left to the class of the configuration, whatever the general rules say."""


@dataclass(frozen=True)
class Tiny:
    """What tiny models of a family's types need beyond the general rules of `autopack.tiny`, by model type.

    Types may be those of a part, such as a text model or a vision tower.
    """

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the configuration. A nested dictionary goes to the part of that name."""
    causal: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields that belong to models for causal language modelling alone, and to parts."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Types of parts that have to be named, because the class or an older release of it makes none by default."""
    stand_ins: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = field(default_factory=dict)
    """Types, with further fields, that stand in for parts that need a package beside transformers."""
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The types that take images, by the form in which they do (`autopack.tiny.images.FORMS`)."""
    sounds: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The types that take sounds, by the form in which they do (`autopack.tiny.sounds.FORMS`)."""
    with_sounds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the configuration of types that have an encoder of sounds only where it is asked for."""
    needs_images: frozenset[str] = frozenset()
    """Types that transformers cannot run without an image: each document has to have one."""
    not_alone: frozenset[str] = frozenset()
    """Types that cannot be built, because they are no models on their own; `Family.refused_types` says why."""


def _by_class(known: Mapping[str, Any], module: torch.nn.Module) -> Any:
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from theirs.
    return next((known[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in known), None)


@dataclass(frozen=True)
class Family:
    """One way of serving a set of architectures, and everything that has to be known of their model types.

    `model_types` are those that a run of the leak test has covered; a model of another type that has the same structure
    is audited when it is enabled. `how` tells readers in a few words how they are served.
    `adjustments` map the class name of an attention module to a function that takes
    (module, layout, query, key, value, options) and returns the last four as a document alone would have them.
    `sites` are further functions of transformers to stand at while a model of the family is enabled.
    `mixers` map the class name of a module that mixes tokens by recurrence or convolution to the way in which it starts
    anew at every document.
    `within_token` are the class names of modules that attend within each token, over parts of it alone, or within
    media: nothing is done to them and to what they hold.
    `attends` says whether any of its types has attention through transformers' interface.
    `positions` says whether its models with attention take position_ids; where they do not, what counts columns is
    among the mixers.
    `numbering` maps model types to how they number tokens, where that is not by columns from 0.
    `dense_types` score every pair of tokens of a row in code of their own: a row costs the square of its length.
    `media_types` map a kind of media ("image", "video", "sound", "protein") to those model types that a run of the leak
    test has covered with it in the documents; with other media, packed rows are refused. `why_no_media` says by model
    type why none has, where that is known. `counts_images` are types whose models number the images of a batch over
    all its rows, so that each row has to be numbered by itself. `image_mask` is the argument by which text attends to
    images across, (rows, columns, images, ...); `image_of_each` are types whose text attends across to
    one image for each document, without a mask. `unpads_images` are types whose padded batches are one row with their
    images, in the order of the rows: those that make masks of rows outside of the text model.
    `wrong_media` says why the media among these arguments of a packed call are not those of its documents, or None.
    `sounds_together` says by model type, from the configuration, the arguments of a packed call and its layout, why one
    of its sounds would change what another gives, or None; it may name types of other families.
    `refused_arguments` are those that no call may bring with packed rows, with the reason, `refused_without_images`
    those that none may bring that has no images.
    `refusal` says why a config cannot be served, or None; `refused_types` are model types that cannot be served at all,
    `refused_classes` classes of its types and what inherits from them, each with the reason.
    `tiny` says how tiny models of its types are built. It and `numbering` may name types that no family serves.
    """

    name: str
    model_types: frozenset[str]
    how: str
    adjustments: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sites: tuple[Site, ...] = ()
    mixers: Mapping[str, Way] = field(default_factory=dict)
    within_token: frozenset[str] = frozenset()
    attends: bool = True
    positions: bool = True
    numbering: Mapping[str, Numbering] = field(default_factory=dict)
    dense_types: frozenset[str] = frozenset()
    media_types: Mapping[str, frozenset[str]] = field(default_factory=dict)
    why_no_media: Mapping[str, str] = field(default_factory=dict)
    counts_images: frozenset[str] = frozenset()
    image_mask: str | None = None
    image_of_each: frozenset[str] = frozenset()
    unpads_images: frozenset[str] = frozenset()
    wrong_media: Callable[[Mapping[str, Any]], str | None] | None = None
    sounds_together: Mapping[str, Callable[[Any, Mapping[str, Any], PackedLayout], str | None]] = field(
        default_factory=dict
    )
    refused_arguments: Mapping[str, str] = field(default_factory=dict)
    refused_without_images: Mapping[str, str] = field(default_factory=dict)
    refusal: Callable[[Any], str | None] | None = None
    refused_types: Mapping[str, str] = field(default_factory=dict)
    refused_classes: Mapping[str, str] = field(default_factory=dict)
    tiny: Tiny = Tiny()

    def way_of(self, module: torch.nn.Module) -> Way | None:
        """How a module is kept within documents, or None for one that is no mixer of this family."""
        return _by_class(self.mixers, module)

    def adjustment_of(self, module: torch.nn.Module) -> Callable[..., Any] | None:
        """What this family does to the queries, keys and values of an attention module, or None."""
        return _by_class(self.adjustments, module)


_PER_CALL = (*CACHES, "attention_mask", "conv_mask")


@dataclass(frozen=True)
class MixerCall:
    """One call of a module inside a packed forward.

    `first` is the name of the first parameter, which holds the tokens; `want_weights` says whether the caller asked for
    attention weights. `memory` is the layout of the encoder's states, where this is cross-attention.
    """

    original: Callable[..., Any]
    mixer: torch.nn.Module
    first: str
    arguments: dict[str, Any]
    layout: PackedLayout
    want_weights: bool
    memory: PackedLayout | None = None

    def by_documents(self, spread: Spread) -> Any:
        """Run the module's own forward on tokens in another form, without caches and masks."""
        return self.changed(
            lambda name, value: None if name in _PER_CALL else spread_tokens(value, self.layout, spread)
        )

    def changed(self, change: Callable[[str, Any], Any]) -> Any:
        """Run the module's own forward with other arguments."""
        given = {name: change(name, value) for name, value in self.arguments.items()}
        return self.original(self.mixer, given.pop(self.first), **given)

    def check(self) -> None:
        """Raise `UnsupportedModel` where the first tensor does not hold the tokens of the layout."""
        tokens = next((value for value in self.arguments.values() if isinstance(value, torch.Tensor)), None)
        check_tokens(() if tokens is None else tuple(tokens.shape), self.layout, type(self.mixer).__name__)


def check_tokens(
    shape: tuple[int, ...], layout: PackedLayout, name: str, wanted: tuple[int, int] | None = None
) -> None:
    """Raise `UnsupportedModel` where a tensor that `name` got is not (rows, columns, ...), or as `wanted`."""
    if shape[:2] != (wanted or (layout.rows, layout.columns)):
        raise UnsupportedModel(
            f"{name} got tokens of shape {shape} inside a packed forward of {layout.rows} rows of {layout.columns} "
            f"tokens. Train the model on padded batches, one document per row.",
            code="other-tokens",
        )


class Way:
    """How modules of one class are run on packed rows.

    `attends` says that it is attention, which has positions, `recurs` that what it gives a token depends on padding
    before it, which no mask takes out, `counts` that it counts columns, those of padding too, `reads_padding` that what
    stands in padding changes what it gives to tokens, `numbers_itself` that a document is to be run without positions
    that count it from 0, `in_parts` that ranks that have a part of each row can put together what it takes.
    `whole_model_reason`: why nothing less than the whole model can be run on documents, where that is so; `heeds_masks`
    that such a model, with a head of one result per row, gives rows of a padded batch what they get alone. Of decoders:
    `reads_encoder_tokens` says that its model gives it the encoder's tokens, and not those of the labels, where it gets
    none, `masks_without_cache` that its model hides later tokens where it is to fill no cache, and only there;
    `leaves_out` are parts of its model's output that packed calls return none of. `words` and `work` tell readers its
    name and what computes it.
    """

    attends: bool = False
    recurs: bool = True
    counts: bool = False
    in_parts: bool = True
    reads_padding: bool = False
    numbers_itself: bool = False
    whole_model_reason: str | None = None
    heeds_masks: bool = False
    leaves_out: tuple[str, ...] = ()
    reads_encoder_tokens: bool = False
    masks_without_cache: bool = False
    words: str = ""
    work: str = ""

    def run(self, call: MixerCall) -> Any:
        """Run one module on packed rows."""
        raise NotImplementedError

    def of_whole_rows(self, mixer: torch.nn.Module, name: str, value: torch.Tensor, rows: int, columns: int) -> Any:
        """What whole rows have in the place of an argument that was made for a part of their columns; None where a part
        does not say that. Of arguments alone that are none of single tokens."""
        return None

    def here(self, module: str) -> Way:
        """The way that the installed release allows for the mixers of a Python module: this one, or a slower one."""
        return self

    def sites(self, module: str) -> list[Site]:
        """Functions to stand at, besides the module's forward, in the Python module that defines it."""
        return []

    def how(self) -> dict[str, str]:
        """What computes it, in words for readers: by device, or "any"."""
        return {"any": self.work}

    def __str__(self) -> str:
        return self.words or type(self).__name__
