"""How far the losses of two ways are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence


def relative_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of any loss, relative to what is expected; infinite where one is not a number."""
    each = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, each)) else max(each)
