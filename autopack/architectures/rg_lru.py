"""Hybrids of attention and RG-LRU blocks.

Upstream resets the recurrence where a position is 0, but its convolution reaches into the document before.
"""

from dataclasses import replace
from typing import Any

from autopack.family import Family, MixerCall, Tiny
from autopack.mixers import Rows


class _ForgettingRows(Rows):
    """Documents as rows, by a block that keeps the state of its last call: releases up to 4.57 take it up again."""

    def run(self, call: MixerCall) -> Any:
        def from_nothing(mixer: Any, *args: Any, **kwargs: Any) -> Any:
            mixer.rg_lru.recurrent_states = None
            return call.original(mixer, *args, **kwargs)

        return super().run(replace(call, original=from_nothing))


FAMILY = Family(
    name="rg_lru",
    model_types=frozenset({"recurrent_gemma"}),
    how="recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": _ForgettingRows()},
    tiny=Tiny(configs={"recurrent_gemma": {"block_types": ["recurrent", "attention"]}}),
)
