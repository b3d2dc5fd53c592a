"""Weighted losses: the mean over documents of each document's own mean loss, run alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.packing import PackingCollator
from autopack.packing.checks import token_weights
from tests.conftest import gradient_error, gradients, llama, token_ids
from tests.support.refusals import refused

LENGTHS = (3, 20, 7, 2, 12, 5)
PROMPTS = (1, 6, 0, 1, 11, 2)
"""Leading tokens of each document that are no targets; the first never is."""
WEIGHTS = (1.0, 2.0, 0.5, 3.0, 0.0, 1.5)

ROUNDING = 1e-6
"""Relative. Weights are float32, and so is the loss of stock, also of models in float64."""


def examples(weighted: bool = False) -> list[dict[str, Any]]:
    ids = token_ids(columns=sum(LENGTHS), seed=5)[0].split(LENGTHS)
    made = [{"input_ids": d.tolist(), "labels": [-100] * p + d[p:].tolist()} for d, p in zip(ids, PROMPTS, strict=True)]
    return [{**e, "document_weight": w} for e, w in zip(made, WEIGHTS, strict=True)] if weighted else made


def mean_over_documents(model: Any, weights: tuple[float, ...] = (1.0,) * 6) -> tuple[float, list[torch.Tensor]]:
    """The weighted mean of the losses that stock gives each document alone, and its gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for example, weight in zip(examples(), weights, strict=True):
        batch = {name: torch.tensor([values]) for name, values in example.items()}
        total = total + weight * model(**batch, use_cache=False).loss
    loss = total / sum(weights)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)], ids=["one batch", "micro-batches"])
def test_the_loss_of_packed_rows_is_the_mean_over_documents_run_alone(sizes, weighted):
    loss, expected = mean_over_documents(llama(), WEIGHTS if weighted else (1.0,) * 6)
    model = llama()
    autopack.enable(model)
    collate = PackingCollator(loss_weights="document", max_length=24)
    rest = iter(examples(weighted))
    batches = [collate([next(rest) for _ in range(size)]) for size in sizes]
    count = sum(batch["loss_weights"].sum() for batch in batches)
    total = 0.0
    for batch in batches:
        labels, weights = batch.pop("labels"), batch.pop("loss_weights")
        part = autopack.packing.weighted_loss(model(**batch, use_cache=False), labels, weights, count)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss, rel=ROUNDING)
    assert gradient_error(gradients(model), expected) < ROUNDING


def test_a_mean_over_tokens_is_another_loss():
    loss, _ = mean_over_documents(llama())
    model = llama()
    autopack.enable(model)
    batch = PackingCollator()(examples())
    assert abs(model(**batch, use_cache=False).loss.item() - loss) > 0.01
    weights = PackingCollator(loss_weights="token")(examples())["loss_weights"]
    found = autopack.packing.weighted_loss(model(**batch, use_cache=False), batch["labels"], weights)
    assert found.item() == pytest.approx(model(**batch, use_cache=False).loss.item(), rel=ROUNDING)


def test_weights_are_of_targets_alone_and_padding_has_none():
    batch = PackingCollator(loss_weights="document", max_length=24)(examples(weighted=True), "np")
    assert batch["loss_weights"].dtype == np.float32
    assert ((batch["loss_weights"] > 0) <= (batch["labels"] != -100)).all()
    found = [w for row in batch["loss_weights"] for w in row[row > 0]]
    counts = [n - max(p, 1) for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    expected = [w / c for w, c in zip(WEIGHTS, counts, strict=True) for _ in range(c) if w]
    assert found == pytest.approx(expected, rel=ROUNDING)


def test_losses_that_do_not_shift_count_every_label():
    logits = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    documents = [{"input_ids": [1, 2], "labels": [3, -100]}, {"input_ids": [4, 5, 6], "labels": [1, 2, 6]}]
    batch = PackingCollator(loss_weights="document", labels="unshifted")(documents)
    losses = -logits.log_softmax(-1)[0]
    expected = (losses[0, 3] + (losses[2, 1] + losses[3, 2] + losses[4, 6]) / 3) / 2
    found = autopack.packing.weighted_loss(logits, batch["labels"], batch["loss_weights"], shift=False)
    assert found.item() == pytest.approx(expected.item(), rel=ROUNDING)


def test_a_batch_without_targets_has_a_loss_of_zero_and_no_gradient():
    logits = torch.randn(1, 3, 7, requires_grad=True)
    batch = PackingCollator(loss_weights="document")([{"input_ids": [1]}, {"input_ids": [2, 3], "labels": None}])
    labels = torch.full_like(batch["labels"], -100)
    loss = autopack.packing.weighted_loss(logits, labels, torch.zeros(1, 3))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_every_weight_of_a_target_counts():
    logits = torch.randn(1, 6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([[0, 3, -100, 1, 5, 2]])
    losses = -logits[0, :-1].log_softmax(-1)[torch.arange(5), labels[0, 1:].clamp(min=0)]
    for given_ in ([0.0, 2.0, 0.0, -0.5, 1.0, 0.0], [0.0, -2.0, 9.0, -0.5, 1.0, -1.0]):
        weights = torch.tensor(given_, dtype=torch.float64)
        counted = weights[1:].where(labels[0, 1:] != -100, 0)
        found = autopack.packing.weighted_loss(logits, labels, weights[None])
        assert found.item() == pytest.approx(((losses * counted).sum() / counted.sum()).item(), rel=1e-12)
        of_step = autopack.packing.weighted_loss(logits, labels.int(), weights[None], -3.0)
        assert of_step.item() == pytest.approx(((losses * counted).sum() / -3).item(), rel=1e-12), "and int32 labels"
    assert autopack.packing.weighted_loss(logits, labels, weights[None].masked_fill(labels == 5, torch.nan)).isnan()


@pytest.mark.parametrize(
    ("labels", "weights", "words"),
    [
        (torch.zeros(1, 3).long(), None, "loss_weights: wanted a tensor .*, found NoneType"),
        (None, torch.ones(1, 3), "labels: wanted a tensor .*, found NoneType"),
        (torch.zeros(1, 3), torch.ones(1, 3), "labels: wanted ints, found torch.float32"),
    ],
)
def test_labels_and_weights_are_tensors(labels, weights, words):
    with refused("wrong-labels", match=words):
        autopack.packing.weighted_loss(torch.zeros(1, 3, 5), labels, weights)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=8), st.data())
@settings(max_examples=50)
def test_weights_of_a_document_add_up_to_its_own(documents, data):
    lengths, targets = np.array([len(d) for d in documents]), np.concatenate(documents)
    own = np.array([data.draw(st.floats(0, 100, width=32)) for _ in documents])
    found = token_weights(targets, lengths, "document", own)
    sums = np.add.reduceat(found, np.cumsum(lengths) - lengths)
    assert np.allclose(sums, np.where([any(d) for d in documents], own, 0), rtol=1e-5)
    assert not found[~targets].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"document_weight": -1.0}, "at least 0"),
        ({"document_weight": float("nan")}, "finite"),
        ({"document_weight": [1.0, 2.0]}, "document"),
        ({"loss_weights": [1.0] * 3}, "beside"),
        ({"labels": 1}, "labels"),
    ],
)
def test_what_cannot_be_weighed_is_refused(change, words):
    example = {"input_ids": [1, 2, 3], **change}
    with refused("unusable-data", match=words):
        PackingCollator(loss_weights="document")([example])
    with refused("unusable-data", match="not found, but example 0 has it"):
        PackingCollator(loss_weights="document")([{"input_ids": [1], "document_weight": 1.0}, {"input_ids": [1]}])
