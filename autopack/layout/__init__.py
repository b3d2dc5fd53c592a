"""Where the documents of a batch lie, and what a call says of that."""

IGNORED_LABEL = -100
"""The label that every loss of transformers leaves out."""
LEAST_SHARED = 16
"""The least number of tokens that documents begin with in common for these to be computed once."""
