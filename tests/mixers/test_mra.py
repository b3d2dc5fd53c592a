"""MRA, whose attention goes by blocks of 32 columns, with its CUDA kernels replaced by the same sums in torch.

Without them transformers' MRA attends to nothing (modeling_mra.py, `mra2_attention`), which would show little.
They are enabled with `verify=False`: an audit's documents are no multiples of 32 tokens, so by default a model with
kernels is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.mra import modeling_mra

import autopack
from autopack import tiny
from tests.conftest import error, positions

FLOAT32 = 1e-5
"""Of a standard deviation of the logits: the same sums in another order, over two layers."""
LENGTHS = (128, 96)


def _blocks(indices: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.arange(len(indices))[:, None].expand_as(indices)
    return rows, indices.long() // keys, indices.long() % keys


def _mm_to_sparse(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows, q, k = _blocks(indices, key.shape[1])
    return key[rows, k].transpose(-1, -2) @ query[rows, q]  # (batch, blocks, 32 keys, 32 queries)


def _sparse_dense_mm(sparse: torch.Tensor, indices: torch.Tensor, key: torch.Tensor, queries: int) -> torch.Tensor:
    rows, q, k = _blocks(indices, key.shape[1])
    made = torch.zeros(len(key), queries, key.shape[2], 32, dtype=key.dtype)
    return made.index_put((rows, q), key[rows, k] @ sparse, accumulate=True)


def _index_max(values: torch.Tensor, indices: torch.Tensor, queries: int, keys: int) -> Any:
    rows, q, _ = _blocks(indices, keys)
    most = torch.full((len(values), queries, 32), -1e4, dtype=values.dtype)
    for block in range(indices.shape[1]):
        at = rows[:, block], q[:, block]
        most[at] = torch.maximum(most[at], values[:, :, block])
    return most.flatten(1), most[rows, q].transpose(-1, -2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(mm_to_sparse=_mm_to_sparse, sparse_dense_mm=_sparse_dense_mm, index_max=_index_max)
    monkeypatch.setattr(modeling_mra, "mra_cuda_kernel", made)


def _model(task: str = "masked-lm") -> Any:
    # seven pairs of blocks of a row are looked at closely: a document alone needs as many, so at least 96 tokens
    sizes = {"max_position_embeddings": 224, "block_per_row": 1, "hidden_dropout_prob": 0.0}
    return tiny.build("mra", task=task, attention_probs_dropout_prob=0.0, **sizes).train()


def _run(model: Any, ids: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=ids, **given).logits
    model.zero_grad()
    (logits * torch.linspace(0.5, 1.5, logits.shape[-1])).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach()[0], torch.cat(gradients)


def test_packed_documents_are_as_alone(kernels):
    model = _model()
    texts = tiny.tokens(model.config, 1, sum(LENGTHS)).split(LENGTHS, dim=1)
    alone = [_run(model, text) for text in texts]
    wanted, gradients = torch.cat([logits for logits, _ in alone]), sum(gradient for _, gradient in alone)
    row = torch.cat(texts, dim=1)
    where = positions(LENGTHS, start=2)
    assert error(_run(model, row, position_ids=where)[0], wanted) > 0.01, "its blocks go over the row"
    with autopack.enable(model, verify=False):
        found, made = _run(model, row, position_ids=where)
        moved, _ = _run(model, torch.cat([texts[0], texts[1].flip(1)], dim=1), position_ids=where)
    assert error(found, wanted) < FLOAT32
    assert error(made, gradients) < 10 * FLOAT32
    assert torch.equal(moved[: LENGTHS[0]], found[: LENGTHS[0]])
    assert not torch.equal(moved, found)


def test_what_stock_cannot_run_alone_raises_what_stock_raises(kernels):
    model = _model()
    ids, where = tiny.tokens(model.config, 1, 96), positions((64, 32), start=2)
    with pytest.raises(RuntimeError) as stock:
        model(input_ids=ids[:, 64:])
    with autopack.enable(model, verify=False), pytest.raises(RuntimeError) as packed:
        model(input_ids=ids, position_ids=where)
    assert str(packed.value) == str(stock.value)


def test_padded_batches_keep_their_padding(kernels):
    model = _model("sequence-classification")
    mask = (torch.arange(96) < torch.tensor([[96], [64]])).long()
    batch = {"input_ids": tiny.tokens(model.config, 2, 96), "attention_mask": mask}
    wanted = model(**batch).logits
    with autopack.enable(model, verify=False):
        assert torch.equal(model(**batch).logits, wanted)
