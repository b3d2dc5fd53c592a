"""Descriptions of architectures: `autopack.architectures` has a frozen `Family` for each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from autopack.errors import UnsupportedModel
from autopack.inspection.positions import AFTER_PAD_TOKEN as AFTER_PAD_TOKEN
from autopack.inspection.positions import Numbering
from autopack.layout.packed import PackedLayout
from autopack.layout.token_map import Spread, spread_tokens
from autopack.layout.ways import CACHES
from autopack.patching import Site

SoundsRule = Callable[[Any, Mapping[str, Any], PackedLayout], str | None]
"""Function of the configuration, the arguments of a packed call and its layout; it returns the
reason why one of the call's sounds would change another's results, or None."""
DERIVED: Any = "derived"
"""Value of a tiny configuration's field that its class derives, against the general rules."""


Names = frozenset[str]
Texts = Mapping[str, str]
"""Texts by name."""


def named(names: str) -> Names:
    """Return the names in a text, separated by spaces, as a set."""
    return frozenset(names.split())


@dataclass(frozen=True)
class Tiny:
    """Facts for building tiny models of some types, beyond `autopack.tiny`'s general rules.

    Types may be a part's, such as a text model or a vision tower.
    """

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the configuration. A nested dictionary goes to the part with its name."""
    causal: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields for causal language models alone, and for parts."""
    parts: Mapping[str, Texts] = field(default_factory=dict)
    """Types of parts to name, because (older releases of) the class make none by default."""
    stand_ins: Mapping[str, Mapping[str, tuple[str, Mapping[str, Any]]]] = field(
        default_factory=dict
    )
    """Types, with further fields, that stand in for parts that need a package beside transformers.
    """
    images: Mapping[str, Names] = field(default_factory=dict)
    """The types that take images, by the images' form (a case of `autopack.tiny.images`)."""
    sounds: Mapping[str, Names] = field(default_factory=dict)
    """The types that take sounds, by the sounds' form (a case of `autopack.tiny.sounds`)."""
    needs_images: Names = frozenset()
    """Types that transformers cannot run without an image: each document has to have one."""
    not_alone: Names = frozenset()
    """Types that cannot be built, as they are no models alone; see `Family.refused_types`."""


def by_class(known: Mapping[str, Any], kind: type) -> Any:
    """Return the value for the name of a module's class or its nearest known base, or None."""
    # By the names of the bases too: FSDP puts modules into a class of its own that derives from
    # theirs.
    return next((known[cls.__name__] for cls in kind.__mro__ if cls.__name__ in known), None)


@dataclass(frozen=True)
class Family:
    """Facts about a set of model types that autopack serves in one way.

    `model_types` are those that its facts are known to fit; a model of another type is served by it
    if it has the same structure. `how` describes the way in a few words, for readers.

    `adjustments` map the class name of an attention module to a function that takes (module,
    layout, query, key, value, options) and returns the last four as a document alone would have
    them. `mixers` map the class name of a module that mixes tokens by recurrence or convolution to
    the way in which it starts anew at every document. `within_token` are the class names of modules
    that attend within each token, over parts of it alone, or within media: they and their parts
    stay unchanged.

    `positions` is True if its models with attention take position_ids; otherwise the mixers contain
    the modules that count columns. `numbering` maps model types to their rule for positions, if
    that is not by columns from 0. `dense_types` score every pair of tokens of a row in code of
    their own: a row costs the square of its length.

    `media_types` map a kind of media ("image", "video", "sound", "protein") to the model types
    whose documents may have it, beside images and sounds whose form `tiny` knows; with other media,
    packed rows are refused. `why_no_media` gives the known reasons, by model type, why a type has
    none. `counts_images` are types whose models number the images of a batch over all its rows, so
    that each row has to be numbered by itself. `image_mask` is the argument by which text attends
    to images across, (rows, columns, images, ...). `image_of_each` are types whose text attends
    across to one image for each document, without a mask. `unpads_images` are types whose padded
    batches run as one row with their images, in the order of the rows: they make masks of rows
    outside of the text model. `wrong_media` returns the reason why the media among these arguments
    of a packed call are not the documents' own, or None. `sounds_together` maps a model type to a
    function of the configuration, the arguments of a packed call and its layout. It returns the
    reason why one of the call's sounds would change another's results, or None. It may name types
    of other families.

    `refused_arguments` are arguments that no call may bring with packed rows, with the reason;
    `refused_without_images` are arguments that no call without images may bring. `refusal` returns
    the reason why a config cannot be served, or None. `refused_types` are model types that cannot
    be served at all, `refused_classes` classes of its types and their subclasses, each with the
    reason.

    `tiny` describes how to build tiny models of its types. It and `numbering` may name types that
    no family serves.
    """

    name: str
    model_types: Names
    how: str
    adjustments: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    mixers: Mapping[str, Way] = field(default_factory=dict)
    within_token: Names = frozenset()
    positions: bool = True
    numbering: Mapping[str, Numbering] = field(default_factory=dict)
    dense_types: Names = frozenset()
    media_types: Mapping[str, Names] = field(default_factory=dict)
    why_no_media: Texts = field(default_factory=dict)
    counts_images: Names = frozenset()
    image_mask: str | None = None
    image_of_each: Names = frozenset()
    unpads_images: Names = frozenset()
    wrong_media: Callable[[Mapping[str, Any]], str | None] | None = None
    sounds_together: Mapping[str, SoundsRule] = field(default_factory=dict)
    refused_arguments: Texts = field(default_factory=dict)
    refused_without_images: Texts = field(default_factory=dict)
    refusal: Callable[[Any], str | None] | None = None
    refused_types: Texts = field(default_factory=dict)
    refused_classes: Texts = field(default_factory=dict)
    tiny: Tiny = Tiny()

    @classmethod
    def of(cls, name: str, model_types: str, how: str, **facts: Any) -> Family:
        """Return a family of facts in which a text stands for each of the names in it."""

        def spelt(value: Any, kind: str) -> Any:
            if isinstance(value, Mapping):
                inner = kind.partition(",")[2]
                return {n: spelt(v, inner) for names, v in value.items() for n in names.split()}
            return named(value) if "Names" in kind else value

        kinds = {each.name: each.type for each in fields(cls)}
        given = {fact: spelt(value, str(kinds[fact])) for fact, value in facts.items()}
        return cls(name, named(model_types), how, **given)

    @property
    def media(self) -> dict[str, Names]:
        """Model types whose documents may have media, by kind, also types of other families."""
        kinds = {"image": self.tiny.images, "sound": self.tiny.sounds}
        known = {kind: Names().union(*forms.values()) for kind, forms in kinds.items()}
        more = self.media_types.items()
        return known | {kind: known.get(kind, Names()) | types for kind, types in more}


_PER_CALL = (*CACHES, "attention_mask", "conv_mask")


@dataclass(frozen=True)
class MixerCall:
    """One call of a mixer inside a packed forward, with its original function and the layout.

    `first` is the name of the first parameter, which holds the tokens. `want_weights` is True if
    the caller asked for attention weights. `memory` is the layout of the encoder's states, for
    cross-attention.
    """

    original: Callable[..., Any]
    mixer: torch.nn.Module
    first: str
    arguments: dict[str, Any]
    layout: PackedLayout
    want_weights: bool
    memory: PackedLayout | None = None

    def by_documents(self, spread: Spread) -> Any:
        """Return the mixer's result on arguments rearranged by `spread`, without caches, masks."""
        shape = (self.layout.rows, self.layout.columns)
        return self.changed(
            lambda name, value: None if name in _PER_CALL else spread_tokens(value, shape, spread)
        )

    def changed(self, change: Callable[[str, Any], Any]) -> Any:
        """Return the mixer's result with each argument replaced by `change(name, value)`."""
        given = {name: change(name, value) for name, value in self.arguments.items()}
        return self.original(self.mixer, given.pop(self.first), **given)

    def check(self) -> None:
        """Raise `UnsupportedModel` unless the first tensor has the layout's rows and columns."""
        tokens = next(
            (value for value in self.arguments.values() if isinstance(value, torch.Tensor)), None
        )
        check_tokens(
            () if tokens is None else tuple(tokens.shape), self.layout, type(self.mixer).__name__
        )


def check_tokens(shape: tuple[int, ...], layout: PackedLayout, name: str) -> None:
    """Raise `UnsupportedModel` unless tokens of this shape have the layout's (rows, columns).

    `name` is the module or function that got them.
    """
    if shape[:2] != (layout.rows, layout.columns):
        raise UnsupportedModel(
            f"{name} got tokens of shape {shape} inside a packed forward of {layout.rows} rows of "
            f"{layout.columns} tokens. Train the model on padded batches, one document per row.",
            code="other-tokens",
        )


class Way:
    """Base of the ways to run a class of mixers on packed rows, with facts about these mixers.

    Its flags are True under these conditions:

    - `attends`: it is attention, which has positions.
    - `recurs`: its results at a token depend on padding before it, which no mask takes out.
    - `counts`: it counts columns, padding's too.
    - `reads_padding`: the values in padding change its results at tokens.
    - `in_parts`: ranks with a part of each row can put its arguments together.
    - `reads_encoder_tokens`: a decoder that gets no tokens is given the encoder's, not the labels'.
    - `masks_without_cache`: a decoder's model hides later tokens only if it is to fill no cache.

    `whole_model_reason` is the reason why only the whole model can be run on documents, or None.
    `leaves_out` are parts of a decoder's model's output that packed calls do not return.
    """

    attends: bool = False
    recurs: bool = True
    counts: bool = False
    in_parts: bool = True
    reads_padding: bool = False
    whole_model_reason: str | None = None
    leaves_out: tuple[str, ...] = ()
    reads_encoder_tokens: bool = False
    masks_without_cache: bool = False

    def run(self, call: MixerCall) -> Any:
        """Return the result of a mixer's call on packed rows, kept within documents."""
        raise NotImplementedError

    def here(self, module: str) -> Way:
        """Return this way, or a slower one if the installed release's Python `module` needs it."""
        return self

    def sites(self, module: str) -> list[Site]:
        """Return the sites in a Python `module` that the way needs, besides the mixer's forward."""
        return []
