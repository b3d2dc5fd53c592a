"""RoFormer, which rotates by columns: its table of rotations begins anew with every document."""

from __future__ import annotations

from typing import Any

import torch

from autopack.family import Family, MixerCall, Tiny, Way
from autopack.mixers import Alone


class _TableOfLongest(Way):
    """The table of rotations of the longest document, however long the row: attention takes its beginning."""

    recurs = False
    counts = True
    words = "table of the longest document"
    work = "the table itself"

    def run(self, call: MixerCall) -> Any:
        shape = torch.Size((call.layout.rows, call.layout.max_seqlen))
        return call.changed(lambda name, value: shape if name == call.first else value)


FAMILY = Family(
    name="roformer",
    model_types=frozenset({"roformer"}),
    how="the model's own attention, documents alone; rotations restart",
    positions=False,
    attends=False,
    mixers={
        "RoFormerSelfAttention": Alone(beginnings=(("sinusoidal_pos", 2),), by_columns=True),
        "RoFormerSinusoidalPositionalEmbedding": _TableOfLongest(),
    },
    tiny=Tiny(causal={"roformer": {"is_decoder": True}}),
)
