"""Architectures that the leak test has found to mix documents in ways that no family undoes yet, with the reason.

Their attention alone could be kept apart, so they would pass a look at their structure; only this list, or an audit,
keeps them from leaking.
"""

from autopack.architectures import Family

__all__ = ["FAMILY"]

_REASONS = {
    "it is a drafter that takes the states of a target model": "gemma4_assistant gemma4_unified_assistant",
    "it has no forward of its own over its thinker and talker; enable `model.thinker`": "qwen2_5_omni qwen3_omni_moe",
}

FAMILY = Family(
    name="refused",
    model_types=frozenset(),
    path="refused",
    refused_types={name: reason for reason, names in _REASONS.items() for name in names.split()},
)
