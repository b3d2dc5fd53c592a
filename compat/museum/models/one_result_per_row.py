"""A classifier with one result per row."""

from __future__ import annotations

from functools import partial

from compat.museum.exhibit import Exhibit
from compat.museum.models._stock import enabled, stock

EXHIBIT = Exhibit(
    kind="heads",
    reported=("trl#3780",),
    says=(
        "Classifiers and reward models give one result per row of their batch, that of its "
        "last token. A packed row has several documents, and all but one get none."
    ),
    mistaken=partial(stock, "llama", "sequence-classification"),
    sound=partial(enabled, "llama", "sequence-classification"),
)
