"""A sample of the tests of unfamiliar code: all of them together take half an hour.

`UNFAMILIAR=all python -m pytest tests/unfamiliar` runs every case.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from typing import Any

EACH = 5
"""Cases of each test that are run, evenly spread: types, places and moments alternate from one case to the next.
Each test begins with another one, so that the tests of a file together see ten types and more."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if os.environ.get("UNFAMILIAR") == "all" or any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        if "unfamiliar" in item.path.parts:
            cases[item.path, item.originalname].append(item)
    left_out = set()
    for found in cases.values():
        first = zlib.crc32(found[0].originalname.encode())
        kept = {(first + i * len(found) // EACH) % len(found) for i in range(EACH)}
        left_out |= {id(item) for number, item in enumerate(found) if len(found) > EACH and number not in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
