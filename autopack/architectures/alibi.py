"""Decoders whose attention adds a bias by distance (ALiBi, arXiv 2108.12409), in code of their own."""

import sys
from typing import Any

import torch
from torch import nn

from autopack.family import Family
from autopack.mixers import Alone


class _Bloom(Alone):
    """Bloom's biases, (rows * heads, 1, columns), are made anew for whole rows, by the model's own function."""

    def of_whole_rows(self, mixer: nn.Module, name: str, value: torch.Tensor, rows: int, columns: int) -> Any:
        if name != "alibi":
            return None
        make: Any = vars(sys.modules[type(mixer).__module__])["build_alibi_tensor"]
        ones = torch.ones(rows, columns, dtype=torch.long, device=value.device)
        return make(ones, len(value) // rows, value.dtype)


FAMILY = Family(
    name="alibi",
    model_types=frozenset("bloom mpt".split()),
    how="the model's own attention, documents alone; biases restart",
    positions=False,
    attends=False,
    mixers={"BloomAttention": _Bloom(per_head=("alibi",)), "MptAttention": Alone(by_columns=True)},
)
