"""A decoder that sees the sources of all pairs.

encoder-decoders: mesh#173

Pairs of a source and a target share a row on either side. Every target attends to every source,
since nothing says which belong together.
"""

from __future__ import annotations

from functools import partial

from compat.museum.models._stock import enabled, stock

mistaken = partial(stock, "t5", "seq2seq")
sound = partial(enabled, "t5", "seq2seq")
