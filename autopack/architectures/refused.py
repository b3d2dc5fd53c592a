"""Architectures that mix documents, by the leak test, in ways that no family undoes yet, with the
reason.

Their attention alone could be kept apart, so they would pass a check of their structure; only this
list, or an audit, keeps them from leaking.
"""

from __future__ import annotations

from autopack.family import Family, Tiny, named

_DRAFTERS = "gemma4_assistant gemma4_unified_assistant"

FAMILY = Family.of(
    "refused",
    "",
    "refused",
    refused_types={
        "udop": "its encoder puts the patches of an image behind all text of the row, and takes "
        "out those in which any token has its box, padding too (5.23.0, modeling_udop.py:219)",
        _DRAFTERS: "it is a drafter that takes the states of a target model",
        "diffusion_gemma": "it refines one canvas per row over the cache of the whole row, and "
        "draws it at random, so a document alone has no result (5.23.0, "
        "modeling_diffusion_gemma.py:1552)",
        "pi0": "it plans the actions of a row, from one state and over the cache of the whole row, "
        "and gives its tokens nothing (5.23.0, modeling_pi0.py:302)",
        "qwen2_5_omni qwen3_omni_moe": "it has no forward of its own over its thinker and talker; "
        "enable `model.thinker`",
        "voxtral_realtime": "it adds the frames of a row's sound to the tokens of the row one by "
        "one (VoxtralRealtimeModel.forward), and its encoder reads them as one stream",
    },
    tiny=Tiny(not_alone=named(_DRAFTERS)),
)
