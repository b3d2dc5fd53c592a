"""Lengths of documents that cross the numbers of a configuration: windows, chunks, limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import PreTrainedModel

from autopack.registry import first_position

LONGEST = 512
"""Largest threshold that the auditor crosses: its rows are to stay short."""
_SIZES = re.compile(
    r"(^|_)(ids?|index|size|dim|dims|rank|ranks|heads?|layers?|experts?|channels?|groups?|"
    r"labels?|classes|version|"
    r"embd|model|inner|ff|ffn|kv|state|states|width|depth|features?|hidden|vocab|planes|"
    r"topk|top_k|tok|init)$|^num_|^n_"
)
"""Names of numbers that measure a model and not a row."""
_LENGTHS = re.compile(
    r"window|chunk|floor|rope|position|length|len$|seq|block|context|ctx|sliding|stride|local|"
    r"distance|bucket|cutoff|thresh|span|limit|segment|period|scal"
)
"""Names of numbers that measure a row, whatever else is in them."""
_MOST = re.compile(r"max.*(pos|seq|len)|n_positions|n_ctx|num_positions|(context|seq|sequence)_len")
"""Names of the largest number of positions of a document."""


_NO_TEXT = re.compile("vision|audio|image|video|id2label|label2id")
"""Names of what says nothing of text."""


def threshold_lengths(model: PreTrainedModel, usual: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return lengths of documents: one crosses all thresholds by itself, short ones follow it.

    None where the usual lengths cross them already, or where there is none up to `LONGEST`.
    """
    numbers = list(_named_numbers(model))
    of_rows = [n for name, n in numbers if _LENGTHS.search(name) or not _SIZES.search(name)]
    crossed = [n for n in of_rows if max(usual) <= n <= LONGEST]
    if not crossed:
        return None
    positions = [n for name, n in numbers if _MOST.search(name) and n >= max(usual)]
    most = min(positions, default=2 * LONGEST) - first_position(model.config)
    return 5, max(min(max(crossed) + 5, most), max(usual)), 9, 3


def _named_numbers(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield name and value of whole numbers in a configuration, and of modules' lengths."""
    for path, value in tree_flatten_with_path(model.config.to_dict())[0]:
        names = [str(key.key) for key in path if isinstance(key, MappingKey)]
        if (
            type(value) in (int, float)
            and float(value).is_integer()
            and not any(map(_NO_TEXT.search, names))
        ):
            yield names[-1], int(value)
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is int and _LENGTHS.search(name):
                yield name, value
