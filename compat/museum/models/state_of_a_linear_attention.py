"""The state of a linear attention.

states: ms-swift#9618, Automodel#2147

The bounds of documents were dropped on the way to the linear attention of Qwen3.5. Its state and
its convolution went on over the row, while attention beside it kept documents apart.
"""

from __future__ import annotations

from functools import partial

from compat.museum.models._stock import enabled, stock

mistaken = partial(stock, "qwen3_5_text")
sound = partial(enabled, "qwen3_5_text")
