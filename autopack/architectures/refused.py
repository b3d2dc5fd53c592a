"""Architectures that the leak test has found to mix documents in ways that no family undoes yet, with the reason.

Their attention alone could be kept apart, so they would pass a look at their structure; only this list, or an audit,
keeps them from leaking.
"""

from autopack.family import Family, Tiny

_REASONS = {
    "its encoder puts the patches of an image behind all text of the row, and its biases need boxes": "udop",
    "it is a drafter that takes the states of a target model": "gemma4_assistant gemma4_unified_assistant",
    "its decoder attends to its encoder's cache of the whole row, and refines one canvas per row": "diffusion_gemma",
    "it takes a state and plans actions once per row, over the cache of the whole row": "pi0",
    "it has no forward of its own over its thinker and talker; enable `model.thinker`": "qwen2_5_omni qwen3_omni_moe",
    "it adds the frames of a row's sound to the tokens of the row one by one (VoxtralRealtimeModel.forward), and its "
    "encoder reads them as one stream": "voxtral_realtime",
}

FAMILY = Family(
    name="refused",
    model_types=frozenset(),
    how="refused",
    refused_types={name: reason for reason, names in _REASONS.items() for name in names.split()},
    tiny=Tiny(
        not_alone=frozenset("gemma4_assistant gemma4_unified_assistant".split()),
    ),
)
