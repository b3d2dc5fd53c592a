"""At which lengths a model may begin to behave otherwise: whole numbers that its configurations and modules hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from autopack.registry import first_position

LONGEST = 512
"""Thresholds above are not crossed by the auditor: its rows are to stay short."""
_SIZES = re.compile(
    r"(^|_)(ids?|index|size|dim|dims|rank|ranks|heads?|layers?|experts?|channels?|groups?|labels?|classes|version|"
    r"embd|model|inner|ff|ffn|kv|state|states|width|depth|features?|hidden|vocab|planes|topk|top_k|tok|init)$|^num_|^n_"
)
"""Names of numbers that measure a model and not a row."""
_LENGTHS = re.compile(
    r"window|chunk|floor|rope|position|length|len$|seq|block|context|ctx|sliding|stride|local|distance|bucket|cutoff|"
    r"thresh|span|limit|segment|period|scal"
)
"""Names of numbers that measure a row, whatever else is in them."""
_MOST = re.compile(r"max.*(pos|seq|len)|n_positions|n_ctx|num_positions|(context|seq|sequence)_len")
"""Names of the number of positions that a document may have."""


def threshold_lengths(model: PreTrainedModel, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """Lengths of documents of which one crosses all thresholds by itself, and short ones stand behind them in the row.

    None where the usual lengths cross them already, or where there is none up to `LONGEST`.
    """
    numbers = list(_numbers(model))
    crossed = [n for name, n in numbers if max(usual) <= n <= LONGEST and _is_length(name)]
    if not crossed:
        return None
    positions = [n for name, n in numbers if _MOST.search(name) and n >= max(usual)]
    most = min(positions, default=2 * LONGEST) - first_position(model.config)
    return 5, max(min(max(crossed) + 5, most), max(usual)), 9, 3


def _is_length(name: str) -> bool:
    return bool(_LENGTHS.search(name)) or not _SIZES.search(name)


def _numbers(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    yield from _inside("", model.config.to_dict())
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, int) and not isinstance(value, bool) and _LENGTHS.search(name):
                yield name, value


def _inside(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, part in value.items():
            if not re.search("vision|audio|image|video|id2label|label2id", str(key)):
                yield from _inside(str(key), part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _inside(name, part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer():
        yield name, int(value)
