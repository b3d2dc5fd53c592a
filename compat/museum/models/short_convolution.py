"""A short convolution across boundaries.

convolutions: transformers#46588

LFM2 called its short convolution without the numbers of documents. It slid over every boundary, and
attention did not.
"""

stock = ("lfm2",)
