"""Properties of one model by its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopack.family import Family
from autopack.inspection.modules import Anatomy
from autopack.inspection.positions import Numbering
from autopack.inspection.source import parameters_of
from autopack.layout.packed import PackedLayout


@dataclass(frozen=True)
class Traits:
    """Facts of one model that follow from its family and its modules.

    Fields that are not explained here are explained in `Family` and `Way`.

    `adjusted`: its attention gets queries, keys or values that were made by columns.
    `counts_columns`: something in it counts columns, padding's too.
    `uses_positions`: it takes `position_ids`. `first_position`: the first token's of a document.
    `knows_padded_positions`: it is known how it numbers a batch with padding on the left.
    `refused_of_text`: arguments that calls without media may not bring, with the reasons.
    `mixing_weights`: the share of its weights, embeddings left out, that mixers hold.
    `media`: the kinds of media that its documents may have.
    """

    family: str
    dense: bool
    whole_model_reason: str | None
    leaves_out: frozenset[str]
    reads_encoder_tokens: bool
    masks_without_cache: bool
    reads_padding: bool
    recurs: bool
    adjusted: bool
    counts_columns: bool
    uses_positions: bool
    first_position: int
    knows_padded_positions: bool
    refused_arguments: Mapping[str, str]
    refused_of_text: Mapping[str, str]
    mixing_weights: float
    media: frozenset[str]
    why_no_media: str | None
    counts_images: bool
    image_of_each: bool
    unpads_images: bool
    image_mask: str | None
    wrong_media: Callable[[Mapping[str, Any]], str | None] | None
    sounds_together: Callable[[Any, Mapping[str, Any], PackedLayout], str | None] | None = None

    @property
    def counts_padding(self) -> bool:
        """True if padding before a token changes its result, by a state or by counted columns."""
        return self.recurs or self.reads_padding or self.counts_columns

    @classmethod
    def of(
        cls, family: Family, anatomy: Anatomy, numbering: Numbering, media: frozenset[str]
    ) -> Traits:
        """Return the traits of a model with this anatomy, served by `family`."""
        ways = {way for mixer in anatomy.mixers if (way := family.way_of(mixer)) is not None}
        attends = bool(anatomy.attention) or any(way.attends for way in ways)
        # A recurrent mixer may begin anew where positions do.
        told_positions = any(
            "position_ids" in parameters_of(type(mixer)).names for mixer in anatomy.mixers
        )
        adjusted = any(family.adjustment_of(module) is not None for module in anatomy.attention)
        of_ways = "reads_encoder_tokens masks_without_cache reads_padding recurs".split()
        of_types = "counts_images image_of_each unpads_images".split()
        flags: dict[str, Any] = {name: any(getattr(way, name) for way in ways) for name in of_ways}
        flags |= {name: anatomy.model_type in getattr(family, name) for name in of_types}
        return cls(
            family=family.name,
            dense=anatomy.model_type in family.dense_types,
            whole_model_reason=next(
                (way.whole_model_reason for way in ways if way.whole_model_reason), None
            ),
            leaves_out=frozenset(name for way in ways for name in way.leaves_out),
            adjusted=adjusted,
            counts_columns=adjusted or any(way.counts for way in ways),
            uses_positions=family.positions and (attends or told_positions),
            first_position=numbering.first_position(anatomy.entries[0].config),
            knows_padded_positions=anatomy.model_type in family.model_types
            and numbering.is_known(anatomy.counts_along_mask),
            refused_arguments=dict(family.refused_arguments),
            refused_of_text={**family.refused_arguments, **family.refused_without_images},
            mixing_weights=_share_of_mixers(anatomy),
            media=media,
            why_no_media=family.why_no_media.get(anatomy.model_type),
            image_mask=family.image_mask,
            wrong_media=family.wrong_media,
            **flags,
        )


def _share_of_mixers(anatomy: Anatomy) -> float:
    """Return the share, 0 to 1, of a model's weights without embeddings that mixers hold."""
    root = anatomy.entries[0]
    try:
        embeddings: Any = root.get_input_embeddings()
    except NotImplementedError:  # of CANINE, which hashes characters
        embeddings = None
    weights = set(root.parameters())
    if isinstance(embeddings, nn.Module):
        weights -= set(embeddings.parameters())
    mixing = weights.intersection(w for mixer in anatomy.mixers for w in mixer.parameters())
    whole = sum(weight.numel() for weight in weights)
    return sum(weight.numel() for weight in mixing) / whole if whole else 0.0
