"""MRA, whose attention goes by blocks of 32 columns, with its CUDA kernels replaced by the same
sums in torch.

Without them transformers' MRA attends to nothing (modeling_mra.py, `mra2_attention`), which would
show little. They are enabled with `verify=False`: an audit's documents are no multiples of 32
tokens, so by default a model with kernels is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers.models.mra import modeling_mra

import autopack
from autopack import tiny
from tests.conftest import positions
from tests.engine import check, leaks, weighted
from tests.support.padded import batch, mask_of

LENGTHS = (128, 96)


def _blocks(indices, keys):
    rows = torch.arange(len(indices))[:, None].expand_as(indices)
    return rows, indices.long() // keys, indices.long() % keys


def _mm_to_sparse(query, key, indices):
    rows, q, k = _blocks(indices, key.shape[1])
    return key[rows, k].transpose(-1, -2) @ query[rows, q]  # (batch, blocks, 32 keys, 32 queries)


def _sparse_dense_mm(sparse, indices, key, queries):
    rows, q, k = _blocks(indices, key.shape[1])
    made = torch.zeros(len(key), queries, key.shape[2], 32, dtype=key.dtype)
    return made.index_put((rows, q), key[rows, k] @ sparse, accumulate=True)


def _index_max(values, indices, queries, keys):
    rows, q, _ = _blocks(indices, keys)
    most = torch.full((len(values), queries, 32), -1e4, dtype=values.dtype)
    for block in range(indices.shape[1]):
        at = rows[:, block], q[:, block]
        most[at] = torch.maximum(most[at], values[:, :, block])
    return most.flatten(1), most[rows, q].transpose(-1, -2)


@pytest.fixture
def kernels(monkeypatch):
    made = SimpleNamespace(
        mm_to_sparse=_mm_to_sparse, sparse_dense_mm=_sparse_dense_mm, index_max=_index_max
    )
    monkeypatch.setattr(modeling_mra, "mra_cuda_kernel", made)


def _model(task="masked-lm"):
    # seven pairs of blocks of a row are looked at closely: a document alone needs as many, so at
    # least 96 tokens
    sizes = {"max_position_embeddings": 224, "block_per_row": 1, "hidden_dropout_prob": 0.0}
    return tiny.build("mra", task=task, attention_probs_dropout_prob=0.0, **sizes).train()


_weighted = partial(weighted, states=1e-5)
"""Of a standard deviation of the logits: the same sums in another order, over two layers."""


def test_packed_documents_are_as_alone(kernels):
    model = _model()
    texts = tiny.tokens(model.config, 1, sum(LENGTHS)).split(LENGTHS, dim=1)
    row, where = torch.cat(texts, dim=1), positions(LENGTHS, start=2)
    logits = torch.cat([model(input_ids=text).logits for text in texts], dim=1)
    expected, call = _weighted(model, logits), {"input_ids": row, "position_ids": where}
    assert leaks(_weighted(model, model(**call).logits), expected), "its blocks go over the row"
    with autopack.enable(model, verify=False):
        check(_weighted(model, model(**call).logits), expected)


def test_padded_batches_keep_their_padding(kernels):
    model = _model("sequence-classification")
    padded = batch("backbone", mask_of((96, 64)))
    wanted = model(**padded).logits
    with autopack.enable(model, verify=False):
        assert torch.equal(model(**padded).logits, wanted)
