"""Packing functions of others that are loaded by themselves, from a package that is installed or was downloaded.

    pip download llamafactory --no-deps --dest FOLDER          gives FOLDER/llamafactory-….whl

LLaMA-Factory is loaded as the one file that holds its packing, which needs nothing but the standard library.
"""

from __future__ import annotations

import sys
import types
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

LLAMAFACTORY = "llamafactory/data/processor/processor_utils.py"
BATCH = 1000
"""Examples that LLaMA-Factory packs at a time unless told otherwise (`preprocessing_batch_size`)."""

Knapsack = Callable[[list[int], int], list[list[int]]]


def llamafactory(wheel: Path | None) -> tuple[Knapsack, str] | None:
    """Return LLaMA-Factory's `greedy_knapsack`, which empties the list of lengths, and its version.

    It is that of a wheel, else of the package that is installed; `None` where there is none.
    """
    if wheel is not None:
        source, version = zipfile.ZipFile(wheel).read(LLAMAFACTORY).decode(), wheel.name.split("-")[1]
    else:
        try:
            found = distribution("llamafactory")
        except PackageNotFoundError:
            return None
        source, version = Path(str(found.locate_file(LLAMAFACTORY))).read_text(), found.version
    module: Any = types.ModuleType("llamafactory_processor_utils")
    sys.modules[module.__name__] = module  # where dataclasses look a class's module up
    exec(compile(source, LLAMAFACTORY, "exec"), vars(module))
    return module.greedy_knapsack, version


def packed(knapsack: Knapsack, batches: list[list[int]], max_length: int) -> int:
    """The rows that LLaMA-Factory makes of lengths, batch by batch."""
    return sum(len(knapsack(list(batch), max_length)) for batch in batches)
