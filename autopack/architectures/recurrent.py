"""Recurrent mixers that carry a state from one document into the next, alone or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopack.family import Family, MixerCall, Tiny
from autopack.mixers import ROWS, LookingBack, Rows

# Lightning attention carries a sum over all tokens before.
LIGHTNING = Family(
    name="lightning",
    model_types=frozenset({"minimax"}),
    how="lightning attention on documents as rows; attention document by document",
    mixers={"MiniMaxLightningAttention": ROWS},
    tiny=Tiny(configs={"minimax": {"block_size": 8}}),
)


class _ForgettingRows(Rows):
    """Documents as rows, by a block that keeps the state of its last call: releases up to 4.57 take it up again."""

    def run(self, call: MixerCall) -> Any:
        def from_nothing(mixer: Any, *args: Any, **kwargs: Any) -> Any:
            mixer.rg_lru.recurrent_states = None
            return call.original(mixer, *args, **kwargs)

        return super().run(replace(call, original=from_nothing))


# Upstream resets the recurrence where a position is 0, but its convolution reaches into the document before.
RG_LRU = Family(
    name="rg_lru",
    model_types=frozenset({"recurrent_gemma"}),
    how="recurrent block on documents as rows; attention document by document",
    mixers={"RecurrentGemmaRecurrentBlock": _ForgettingRows()},
    tiny=Tiny(configs={"recurrent_gemma": {"block_types": ["recurrent", "attention"]}}),
)


def _to_the_token_before(mixer: Any) -> int:
    return 1


# Time mixing is a recurrence, and both halves of a block look at the token before.
RWKV = Family(
    name="rwkv",
    model_types=frozenset({"rwkv"}),
    how="time mixing on documents as rows; channel mixing again at the start of each",
    attends=False,
    mixers={"RwkvFeedForward": LookingBack(_to_the_token_before), "RwkvSelfAttention": ROWS},
    tiny=Tiny(configs={"rwkv": {"attention_hidden_size": 64}}),
)

# Its memory is a matrix.
XLSTM = Family(
    name="xlstm",
    model_types=frozenset({"xlstm"}),
    how="memory cell on documents as rows",
    attends=False,
    mixers={"xLSTMLayer": ROWS},
    tiny=Tiny(configs={"xlstm": {"autocast_kernel_dtype": "float32"}}),
)
