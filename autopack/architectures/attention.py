"""Decoders (and encoders) whose only token mixing is attention through transformers' interface.

They leak because masks are split by documents only where `position_ids` reach the mask and neither a mask nor a cache
comes along. Here every attention call is made within documents, so nothing depends on what the mask code saw.
"""

from autopack.architectures import Family

FAMILY = Family(
    name="attention",
    model_types=frozenset({"llama"}),
    path="attention site, document by document",
)
