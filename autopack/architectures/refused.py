"""Architectures that the leak test has found to mix documents in ways that no family undoes yet, with the reason.

Their attention alone could be kept apart, so they would pass a look at their structure; only this list, or an audit,
keeps them from leaking.
"""

from autopack.architectures import Family

__all__ = ["FAMILY"]

_REASONS = {
    "it is a drafter that takes the states of a target model": "gemma4_assistant gemma4_unified_assistant",
    "FSMT's Attention has tokens before the batch, and its forward makes the decoder's tokens of the encoder's": "fsmt",
    "LEDEncoderSelfAttention pads the row to a multiple of its window and attends by blocks of the row": "led",
    "LongT5LocalAttention attends by blocks of the row, and pads them into the bias that it hands on": "longt5",
    "NllbMoeTop2Router drops what goes over a capacity that it reckons from all tokens of the batch": "nllb-moe",
    "PegasusXGlobalLocalAttention attends by blocks of the row and through tokens that all of it shares": "pegasus_x",
    "T5Gemma2MergedAttention attends to the decoder's tokens and the encoder's states in one softmax": "t5gemma2",
}

FAMILY = Family(
    name="refused",
    model_types=frozenset(),
    path="refused",
    refused_types={name: reason for reason, names in _REASONS.items() for name in names.split()},
)
