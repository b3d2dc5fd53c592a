"""Places of the documents of a batch, and how a call declares them."""

import numpy as np

IGNORED_LABEL = -100
"""Label that every loss of transformers ignores."""
LABEL_KEYS = ("labels", "label", "label_ids")
"""Names of labels in examples, and in columns of data."""
COMPLETION_KEYS = ("completion_mask", "assistant_masks")
"""Columns with 1 at tokens that are targets, for examples without labels."""
LEAST_SHARED = 16
"""Smallest number of tokens that are computed once if documents begin with them in common."""


def common_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of elements that two arrays begin with in common."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
