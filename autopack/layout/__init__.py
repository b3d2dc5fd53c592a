"""Places of the documents of a batch, and how a call declares them."""

IGNORED_LABEL = -100
"""Label that every loss of transformers ignores."""
LEAST_SHARED = 16
"""Smallest number of tokens that are computed once if documents begin with them in common."""
