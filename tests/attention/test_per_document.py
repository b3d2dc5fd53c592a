"""Attention once per document: equally long documents are a batch, and one call of the model's function."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

import autopack
from tests.conftest import FLOAT64, alone, error, llama, token_ids

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(("lengths", "calls"), [((6, 6, 6), 1), ((6, 7, 5), 3), ((18,), 1)])
def test_calls_of_the_attention_function(monkeypatch, lengths, calls):
    seen, sdpa = [], AttentionInterface._global_mapping["sdpa"]

    def counted(module, query, *args, **kwargs):
        seen.append(query.shape[0])
        return sdpa(module, query, *args, **kwargs)

    model, ids = llama("sdpa", num_hidden_layers=1), token_ids(columns=18)
    expected = alone(model, ids, lengths)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", counted)
    with autopack.enable(model, verify="never"), torch.no_grad():
        found = model(input_ids=ids, cu_seq_lens_q=bounds(lengths), cu_seq_lens_k=bounds(lengths)).logits
        assert error(found, expected) <= FLOAT64
        assert len(seen) == calls
        assert sum(seen) == len(lengths)


def bounds(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
