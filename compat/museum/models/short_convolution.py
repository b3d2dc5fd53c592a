"""A short convolution across boundaries.

convolutions: transformers#46588

LFM2 called its short convolution without the numbers of documents. It slid over every boundary, and
attention did not.
"""

from __future__ import annotations

from functools import partial

from compat.museum.models._stock import enabled, stock

mistaken = partial(stock, "lfm2")
sound = partial(enabled, "lfm2")
