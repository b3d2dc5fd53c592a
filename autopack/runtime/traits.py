"""Properties of one model by its family."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopack.family import Family, SoundsRule, by_class
from autopack.inspection.modules import Anatomy
from autopack.inspection.positions import Numbering
from autopack.inspection.source import parameters_of


class Traits:
    """Facts of one model that follow from its family and its modules."""

    def __init__(
        self,
        family: Family,
        anatomy: Anatomy,
        numbering: Numbering,
        media: frozenset[str],
        sounds_together: SoundsRule | None,
    ):
        """Find the traits of a model with this anatomy, served by `family`.

        Attributes that are not explained here are explained in `Family` and `Way`.
        """
        model_type = anatomy.model_type
        ways = {by_class(family.mixers, type(mixer)) for mixer in anatomy.mixers} - {None}
        attends = bool(anatomy.attention) or any(way.attends for way in ways)
        # A recurrent mixer may begin anew where positions do.
        told_positions = any(
            "position_ids" in parameters_of(type(mixer)).names for mixer in anatomy.mixers
        )
        self.family = family.name
        self.dense = model_type in family.dense_types
        reasons = (way.whole_model_reason for way in ways if way.whole_model_reason)
        self.whole_model_reason = next(reasons, None)
        self.leaves_out = frozenset(name for way in ways for name in way.leaves_out)
        self.reads_encoder_tokens = any(way.reads_encoder_tokens for way in ways)
        self.masks_without_cache = any(way.masks_without_cache for way in ways)
        self.reads_padding = any(way.reads_padding for way in ways)
        self.recurs = any(way.recurs for way in ways)
        self.adjusted = any(
            by_class(family.adjustments, type(module)) for module in anatomy.attention
        )
        """True if its attention gets queries, keys or values that depend on columns."""
        self.counts_columns = self.adjusted or any(way.counts for way in ways)
        """True if something in it counts columns, padding's too."""
        self.padding_matters = self.recurs or self.reads_padding or self.counts_columns
        """True if padding before a token changes its result, by a state or by counted columns."""
        self.uses_positions = family.positions and (attends or told_positions)
        """True if it takes `position_ids`."""
        self.first_position = numbering.first_position(anatomy.entries[0].config)
        """The position of the first token of a document."""
        self.knows_padded_positions = model_type in family.model_types and numbering.is_known(
            anatomy.counts_along_mask
        )
        """True if it is known how it numbers a batch with padding on the left."""
        self.refused_arguments = dict(family.refused_arguments)
        self.refused_of_text = {**family.refused_arguments, **family.refused_without_images}
        """Arguments that calls without media may not bring, with the reasons."""
        self.mixing_weights = _share_of_mixers(anatomy)
        """The share of its weights, embeddings left out, that mixers hold."""
        self.media = media
        """The kinds of media that its documents may have."""
        self.why_no_media = family.why_no_media.get(model_type)
        self.counts_images = model_type in family.counts_images
        self.image_of_each = model_type in family.image_of_each
        self.unpads_images = model_type in family.unpads_images
        self.image_mask = family.image_mask
        self.wrong_media = family.wrong_media
        self.sounds_together = sounds_together


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
