"""A decoder that sees the sources of all pairs.

encoder-decoders: mesh#173

Pairs of a source and a target share a row on either side. Every target attends to every source,
since nothing says which belong together.
"""

stock = ("t5", "seq2seq")
