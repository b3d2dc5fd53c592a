"""Perceiver: latents read all tokens of a row, so documents are the rows of a padded batch, which a mask takes out."""

from autopack.family import Family, Tiny
from autopack.mixers import OneByOne

_LATENTS = OneByOne("its latents attend to all tokens of the row", heeds_masks=True)
"""Tokens are read by latents alone, which a mask keeps from padding. Most of its work is that of latents, which are as
many for short documents as for long ones."""
_OF_BYTES = (
    "it gives as many logits as config.max_position_embeddings says, whatever a document's length "
    "(PerceiverForMaskedLM.__init__: `output_index_dims=config.max_position_embeddings`), and its loss takes labels of "
    "no other number, so the tokens of a packed row have none of their own"
)

FAMILY = Family(
    name="perceiver",
    model_types=frozenset({"perceiver"}),
    how="the whole model, documents as a padded batch",
    attends=False,
    refused_classes={"PerceiverForMaskedLM": _OF_BYTES},
    mixers={"PerceiverForSequenceClassification": _LATENTS},
    tiny=Tiny(configs={"perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2}}),
)
