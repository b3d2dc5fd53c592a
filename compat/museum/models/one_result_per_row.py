"""A classifier with one result per row.

heads: trl#3780

Classifiers and reward models give one result per row of their batch, that of its last token. A
packed row has several documents, and all but one get none.
"""

from __future__ import annotations

from functools import partial

from compat.museum.models._stock import enabled, stock

mistaken = partial(stock, "llama", "sequence-classification")
sound = partial(enabled, "llama", "sequence-classification")
