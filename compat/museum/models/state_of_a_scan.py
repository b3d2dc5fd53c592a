"""The state of a selective scan.

states: mamba#434

Mamba has two steps in which tokens meet, its convolution and its scan. Neither takes positions, so
that packed sequences flow into each other.
"""

from __future__ import annotations

from functools import partial

from compat.museum.models._stock import enabled, stock

mistaken = partial(stock, "mamba2")
sound = partial(enabled, "mamba2")
