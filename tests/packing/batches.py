"""Examples, and what is asked of every batch, for the tests of the collator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autopack.errors import InvalidPacking
from autopack.packing import PackingCollator

ABC = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]


def refused(examples: Any, *parts: str, **options: Any) -> str:
    """The message of the refusal, which has all of `parts`."""
    with pytest.raises(InvalidPacking) as error:
        PackingCollator(**options)(examples)
    for part in parts:
        assert part in str(error.value)
    return str(error.value)


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda v: np.array(v, np.int32),
    "uint16": lambda v: np.array(v, np.uint16),
    "tensor": torch.tensor,
    "list of tensors": lambda v: [torch.tensor(i) for i in v],
    "list of numpy ints": lambda v: [np.int64(i) for i in v],
    "row tensor": lambda v: torch.tensor([v]),
    "row list": lambda v: [v],
}


class Documents(Dataset):
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(range(index, index + self.lengths[index]))}
