"""An all-ones mask beside positions."""

from __future__ import annotations

from functools import partial

from compat.museum.exhibit import Exhibit
from compat.museum.models._stock import enabled, stock

EXHIBIT = Exhibit(
    kind="masks",
    reported=("transformers#46634",),
    says=(
        "Positions split the mask into documents only if no attention mask and no cache come with "
        "them. A mask of ones, which collators hand out unasked, joins all documents again."
    ),
    mistaken=partial(stock, "llama"),
    sound=partial(enabled, "llama"),
)
