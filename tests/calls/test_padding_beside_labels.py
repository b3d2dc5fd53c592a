"""What is read at padding beside a loss of labels: the backward pass raises, or such batches keep their padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertModel

import autopack
from autopack import tiny
from autopack.errors import UnsupportedModel
from tests.support.padding_readers import EXACT, IS_READ, backbone, batch, same_gradients, twins

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    "all_columns",
    [
        lambda logits: logits.logsumexp(-1).mean(),
        lambda logits: logits.square().mean(),
        lambda logits: logits.abs().sum(),
    ],
    ids=["logsumexp", "square", "abs"],
)
@pytest.mark.parametrize(
    ("model_type", "task"), [("llama", "causal-lm"), ("bert", "token-classification"), ("t5", "seq2seq")]
)
def test_what_is_read_beside_the_loss_of_labels_raises(model_type, task, all_columns):
    """The backward pass raises before anything is learned, and the step can be run again.

    Squares and absolute values have no slope at zero: zeros at padding would be read unseen.
    """
    stock, model = twins(tiny.build(model_type, task=task).train())
    given: dict[str, Any] = batch(model)
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    if task == "token-classification":
        given["labels"] = given["labels"].clamp(max=1)
    handle = autopack.enable(model)

    def of(which: Any, reads: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        which.zero_grad()
        output = which(**given)
        total = output.loss + reads(output.logits)
        total.backward()
        return total.detach()

    def masked(logits: torch.Tensor) -> torch.Tensor:
        return (logits * given["attention_mask"][..., None]).square().mean()

    for _ in range(2):
        assert torch.allclose(of(model, masked), of(stock, masked), rtol=EXACT)
    assert handle.tally.batches == 2, "nothing of it is read at padding"
    raised = []
    for _ in range(4):  # of a head that takes padded states, calls 1, 2, 4, 8 are looked at
        try:
            of(model, all_columns)
        except UnsupportedModel as error:
            raised.append(str(error))
            break
    assert raised[0].startswith("a gradient came back to logits at padding")
    assert torch.allclose(of(model, all_columns), of(stock, all_columns), rtol=EXACT)
    assert same_gradients(model, stock)


def test_a_loss_of_labels_by_another_name_is_looked_at_too():
    """Its own forward computes it, from arguments that nobody knows."""

    class Users(BertModel):
        def forward(self, targets: Any = None, **arguments: Any) -> Any:
            output = super().forward(**arguments)
            if targets is not None:
                output["loss"] = (output[0].mean(-1) - targets).square().mean()
            return output

    first = backbone()
    model = Users(first.config, add_pooling_layer=False).train()
    model.load_state_dict(first.state_dict())
    stock, model = twins(model)
    given = batch(model)
    targets = torch.zeros(given["input_ids"].shape)
    autopack.enable(model)
    for _ in range(3):
        losses = [which(**given, targets=targets)["loss"] for which in (model, stock)]
        for loss in losses:
            loss.backward()
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=EXACT)
    assert same_gradients(model, stock)


def test_states_that_are_asked_of_a_head_beside_labels_are_looked_at():
    """Squares of zeros have no slope, so that nothing would come back to padding that is not there."""
    stock, model = twins(tiny.build("bert", task="sequence-classification").train())
    given: dict[str, Any] = {**batch(model), "output_hidden_states": True, "labels": torch.tensor([0, 1, 0])}
    handle = autopack.enable(model)
    for _ in range(3):
        losses = []
        for which in (model, stock):
            output = which(**given)
            loss = output.loss + output.hidden_states[-1].square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert torch.allclose(*losses, rtol=EXACT)
    assert any(IS_READ in reason for reason in handle.tally.left)
    assert same_gradients(model, stock)
