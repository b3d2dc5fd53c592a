"""What a mask function says to indices, which is how compiled code reads it, against what its closure says."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from autopack.inspection.mask_rules import seen_by
from autopack.inspection.masks import Pattern, describe_mask

MASK_FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(5),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(5),
    "window alone": masking_utils.sliding_window_overlay(5),
    "the narrower of two windows": masking_utils.and_masks(
        masking_utils.sliding_window_overlay(5),
        masking_utils.sliding_window_overlay(3),
        masking_utils.sliding_window_bidirectional_overlay(4),
    ),
}
UNKNOWN_FUNCTIONS = {
    "padding": masking_utils.padding_mask_function(torch.ones(1, 9)),
    "either": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
    "strictly before": lambda batch, head, query, key: key < query,
    "from a column on": lambda batch, head, query, key: query >= 3,
    "chunks after padding": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    "an offset of each row": lambda batch, head, query, key: key <= query - torch.tensor([2])[batch],
    "even keys": lambda batch, head, query, key: key % 2 == 0,
    "twice as far": lambda batch, head, query, key: key + key <= query,
    "chunks from a column on": lambda batch, head, query, key: (key + 1) // 4 == (query + 1) // 4,
    "a branch": lambda batch, head, query, key: True if query <= key else key <= query,
    "numbers": lambda batch, head, query, key: 1.0,
}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_a_rule_says_the_same_to_indices_as_by_its_closure(name):
    seen, pattern = seen_by(MASK_FUNCTIONS[name]), describe_mask(MASK_FUNCTIONS[name])
    assert pattern is not None
    assert pattern == Pattern(seen.causal, seen.before, seen.after, seen.chunk)


@pytest.mark.parametrize("name", UNKNOWN_FUNCTIONS)
def test_of_a_rule_of_another_kind_nothing_is_concluded(name):
    assert seen_by(UNKNOWN_FUNCTIONS[name]) is None


def test_chunks_are_read_where_no_tensor_says_how_far_a_row_is_padded():
    seen = seen_by(lambda batch, head, query, key: key // 4 == query // 4)
    assert (seen.chunk, seen.causal, seen.before, seen.after) == (4, False, None, None)
