"""A short convolution across boundaries."""

from __future__ import annotations

from functools import partial

from compat.museum.exhibit import Exhibit
from compat.museum.models._stock import enabled, stock

EXHIBIT = Exhibit(
    kind="convolutions",
    reported=("transformers#46588",),
    says=(
        "LFM2 called its short convolution without the numbers of documents. It slid over "
        "every boundary, and attention did not."
    ),
    mistaken=partial(stock, "lfm2"),
    sound=partial(enabled, "lfm2"),
)
