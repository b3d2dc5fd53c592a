"""Architectures that the leak test has found to mix documents in ways that no family undoes yet, with the reason.

Their attention alone could be kept apart, so they would pass a look at their structure; only this list, or an audit,
keeps them from leaking.
"""

from autopack.architectures import Family

__all__ = ["FAMILY"]

_REASONS = {
    "its FunnelEncoder pools every two columns of the row into one between its blocks, so a token of two documents "
    "comes out, and its FunnelAttentionStructure numbers the columns of the pooled row": "funnel",
    "its MraSelfAttention averages keys over blocks of 32 columns and attends closely to the best blocks of the row, "
    "so a document whose length is no multiple of 32 has no result of its own (and without its CUDA kernel it attends "
    "to nothing)": "mra",
    "its PerceiverEncoder's latents attend to all tokens of the row, and every token is decoded from them": "perceiver",
    "it is a drafter that takes the states of a target model": "gemma4_assistant gemma4_unified_assistant",
}

FAMILY = Family(
    name="refused",
    model_types=frozenset(),
    path="refused",
    refused_types={name: reason for reason, names in _REASONS.items() for name in names.split()},
)
