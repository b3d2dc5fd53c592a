"""The state of a selective scan."""

from __future__ import annotations

from functools import partial

from compat.museum.exhibit import Exhibit
from compat.museum.models._stock import enabled, stock

EXHIBIT = Exhibit(
    kind="states",
    reported=("mamba#434",),
    says=(
        "Mamba has two steps in which tokens meet, its convolution and its scan. Neither "
        "takes positions, so that packed sequences flow into each other."
    ),
    mistaken=partial(stock, "mamba2"),
    sound=partial(enabled, "mamba2"),
)
