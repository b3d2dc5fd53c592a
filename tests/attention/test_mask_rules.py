"""What a mask function is found to say, against the function itself on a grid of queries and
keys."""

import pytest
import torch
from transformers import masking_utils

from autopack.inspection.masks import Pattern, describe_mask, pattern_of

SIZE = 12

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
    "either": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    ),
    "strictly before": lambda batch, head, query, key: key < query,
    "from a column on": lambda batch, head, query, key: query >= 3,
    "chunks after padding": masking_utils.chunked_causal_mask_function(
        4, torch.zeros(1, dtype=torch.long)
    ),
    "an offset of each row": lambda batch, head, query, key: (
        key <= query - torch.tensor([2])[batch]
    ),
    "twice as far": lambda batch, head, query, key: key + key <= query,
    "chunks from a column on": lambda batch, head, query, key: (key + 1) // 4 == (query + 1) // 4,
    "a branch": lambda batch, head, query, key: True if query <= key else key <= query,
    "numbers": lambda batch, head, query, key: 1.0,
}


def _on_grid(function):
    query, key = torch.arange(SIZE).view(-1, 1), torch.arange(SIZE).view(1, -1)
    return (
        torch.as_tensor(function(0, 0, query, key)) & torch.ones(SIZE, SIZE, dtype=torch.bool)
    ).tolist()


def _seen(pattern):
    """The grid of a pattern, from the meaning of its fields."""
    return [[_sees(pattern, query, key) for key in range(SIZE)] for query in range(SIZE)]


def _sees(pattern, query, key):
    after = 0 if pattern.causal else SIZE if pattern.after is None else pattern.after
    before = SIZE if pattern.before is None else pattern.before
    same_chunk = pattern.chunk is None or query // pattern.chunk == key // pattern.chunk
    return query - before <= key <= query + after and same_chunk


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
@pytest.mark.parametrize("read", [pattern_of, describe_mask])
def test_a_pattern_is_what_its_rule_says_of_every_pair(name, read):
    assert _seen(read(MASK_FUNCTIONS[name])) == _on_grid(MASK_FUNCTIONS[name])


@pytest.mark.parametrize("name", UNKNOWN_FUNCTIONS)
def test_of_a_rule_of_another_kind_nothing_is_concluded(name):
    assert pattern_of(UNKNOWN_FUNCTIONS[name]) is None


def test_chunks_of_transformers_are_those_of_a_document_without_padding():
    rule = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    assert describe_mask(rule) == Pattern(causal=True, chunk=4)
    assert _seen(describe_mask(rule)) == _on_grid(rule)


def test_chunks_are_read_where_no_tensor_says_how_far_a_row_is_padded():
    assert pattern_of(lambda batch, head, query, key: key // 4 == query // 4) == Pattern(
        causal=False, chunk=4
    )
