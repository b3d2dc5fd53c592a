"""Weighted losses: the mean over documents of each document's own mean loss, run alone."""

import pytest
import torch

import autopack
from autopack.packing import PackingCollator, weighted_loss
from tests.conftest import gradient_error, gradients, llama, token_ids
from tests.packing.batches import loss_alone
from tests.support.refusals import refused

LENGTHS = (3, 20, 7, 2, 12, 5)
PROMPTS = (1, 6, 0, 1, 11, 2)
"""Leading tokens of each document that are no targets; the first never is."""
WEIGHTS = (1.0, 2.0, 0.5, 3.0, 0.0, 1.5)

ROUNDING = 1e-6
"""Relative. Weights are float32, and so is the loss of stock, also of models in float64."""


def examples(weighted=False):
    ids = token_ids(columns=sum(LENGTHS), seed=5)[0].split(LENGTHS)
    made = [
        {"input_ids": d.tolist(), "labels": [-100] * p + d[p:].tolist()}
        for d, p in zip(ids, PROMPTS, strict=True)
    ]
    return (
        [{**e, "document_weight": w} for e, w in zip(made, WEIGHTS, strict=True)]
        if weighted
        else made
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)], ids=["one batch", "micro-batches"])
def test_the_loss_of_packed_rows_is_the_mean_over_documents_run_alone(sizes, weighted):
    stock, model = llama(), llama()
    loss = loss_alone(stock, examples(), WEIGHTS if weighted else [1.0] * 6)
    loss.backward()
    autopack.enable(model)
    collate = PackingCollator(loss_weights="document", max_length=24)
    rest = iter(examples(weighted))
    batches = [collate([next(rest) for _ in range(size)]) for size in sizes]
    count = sum(batch["loss_weights"].sum() for batch in batches)
    total = 0.0
    for batch in batches:
        labels, weights = batch.pop("labels"), batch.pop("loss_weights")
        part = weighted_loss(model(**batch, use_cache=False), labels, weights, count)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=ROUNDING)
    assert gradient_error(gradients(model), gradients(stock)) < ROUNDING


def test_a_mean_over_tokens_is_another_loss():
    model = llama()
    by_document = loss_alone(model, examples(), [1.0] * 6).item()
    autopack.enable(model)
    batch = PackingCollator()(examples())
    output = model(**batch, use_cache=False)
    assert abs(output.loss.item() - by_document) > 0.01
    weights = PackingCollator(loss_weights="token")(examples())["loss_weights"]
    found = weighted_loss(output, batch["labels"], weights)
    assert found.item() == pytest.approx(output.loss.item(), rel=ROUNDING)


def random_logits(columns):
    return torch.randn(
        1, columns, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def test_losses_that_do_not_shift_count_every_label():
    logits = random_logits(5)
    documents = [
        {"input_ids": [1, 2], "labels": [3, -100]},
        {"input_ids": [4, 5, 6], "labels": [1, 2, 6]},
    ]
    batch = PackingCollator(loss_weights="document", labels="unshifted")(documents)
    losses = -logits.log_softmax(-1)[0]
    expected = (losses[0, 3] + (losses[2, 1] + losses[3, 2] + losses[4, 6]) / 3) / 2
    found = weighted_loss(logits, batch["labels"], batch["loss_weights"], shift=False)
    assert found.item() == pytest.approx(expected.item(), rel=ROUNDING)


def test_a_batch_without_targets_has_a_loss_of_zero_and_no_gradient():
    logits = random_logits(3).requires_grad_()
    batch = PackingCollator(loss_weights="document")(
        [{"input_ids": [1], "labels": [1]}, {"input_ids": [2, 3], "labels": [2, -100]}]
    )
    assert batch["loss_weights"].tolist() == [[0, 0, 0]]
    loss = weighted_loss(logits, batch["labels"], batch["loss_weights"])
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_every_weight_of_a_target_counts():
    """Of either sign; those of what is no target do not, and labels may be of int32."""
    logits, labels = random_logits(6), torch.tensor([[0, 3, -100, 1, 5, 2]])
    losses = -logits[0, :-1].log_softmax(-1)[torch.arange(5), labels[0, 1:].clamp(min=0)]
    weights = torch.tensor([[0.0, -2.0, 9.0, -0.5, 1.0, -1.0]], dtype=torch.float64)
    counted = weights[0, 1:].where(labels[0, 1:] != -100, 0)
    total = (losses * counted).sum().item()
    assert weighted_loss(logits, labels, weights).item() == pytest.approx(
        total / counted.sum().item(), rel=1e-12
    )
    assert weighted_loss(logits, labels.int(), weights, -3.0).item() == pytest.approx(
        total / -3, rel=1e-12
    )
    assert weighted_loss(logits, labels, weights.masked_fill(labels == 5, torch.nan)).isnan()


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
        weighted_loss(torch.zeros(1, 3, 5), labels, weights)
