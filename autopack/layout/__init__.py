"""Where the documents of a batch lie, and what a call says of that."""

IGNORED_LABEL = -100
"""The label that every loss of transformers leaves out."""
