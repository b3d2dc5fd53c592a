"""What is read at padding beside a loss of labels: the backward pass raises, or such batches keep
their padding."""

import pytest
import torch
from transformers import BertModel

import autopack
from autopack import tiny
from autopack.errors import UnsupportedModel
from tests.support.padding_readers import EXACT, IS_READ, backbone, batch, same_gradients, twins


def _step(model, call, loss):
    model.zero_grad()
    total = loss(model(**call))
    total.backward()
    return total.detach()


READS = {
    "logsumexp": lambda logits: logits.logsumexp(-1).mean(),
    "square": lambda logits: logits.square().mean(),
}


@pytest.mark.parametrize("reads", READS.values(), ids=[*READS])
@pytest.mark.parametrize(
    ("model_type", "task"),
    [("llama", "causal-lm"), ("bert", "token-classification"), ("t5", "seq2seq")],
)
def test_what_is_read_beside_the_loss_of_labels_raises(model_type, task, reads):
    """The backward pass raises before anything is learned, and the step can be run again.

    Squares and absolute values have no slope at zero: zeros at padding would be read unseen.
    """
    stock, model = twins(tiny.build(model_type, task=task).train())
    given = batch(model)
    given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    if task == "token-classification":
        given["labels"] = given["labels"].clamp(max=1)
    handle = autopack.enable(model)

    def at_tokens(output):
        return output.loss + (output.logits * given["attention_mask"][..., None]).square().mean()

    def at_all(output):
        return output.loss + reads(output.logits)

    for _ in range(2):
        assert torch.allclose(
            _step(model, given, at_tokens), _step(stock, given, at_tokens), rtol=EXACT
        )
    assert handle.tally.batches == 2, "nothing of it is read at padding"
    with pytest.raises(UnsupportedModel, match="a gradient came back to logits at padding"):
        # Of a head that takes padded states, calls 1, 2, 4, 8 are looked at.
        assert [_step(model, given, at_all) for _ in range(4)]
    assert torch.allclose(_step(model, given, at_all), _step(stock, given, at_all), rtol=EXACT)
    assert same_gradients(model, stock)


class Users(BertModel):
    """Its own forward computes a loss of labels by another name, from arguments that nobody
    knows."""

    def forward(self, targets=None, **arguments):
        output = super().forward(**arguments)
        if targets is not None:
            output["loss"] = (output[0].mean(-1) - targets).square().mean()
        return output


def _of_the_user():
    first = backbone()
    model = Users(first.config, add_pooling_layer=False).train()
    model.load_state_dict(first.state_dict())
    return model


@pytest.mark.parametrize(
    ("make", "more", "loss"),
    [
        (_of_the_user, {"targets": torch.zeros(3, 11)}, lambda output: output["loss"]),
        # squares of zeros have no slope, so that nothing would come back to padding that is not
        # there
        (
            lambda: tiny.build("bert", task="sequence-classification").train(),
            {"output_hidden_states": True, "labels": torch.tensor([0, 1, 0])},
            lambda output: output.loss + output.hidden_states[-1].square().mean(),
        ),
    ],
    ids=["a loss of labels by another name", "states that are asked of a head"],
)
def test_what_else_may_be_read_is_looked_at(make, more, loss):
    stock, model = twins(make())
    given = batch(model) | more
    handle = autopack.enable(model)
    for _ in range(3):
        assert torch.allclose(_step(model, given, loss), _step(stock, given, loss), rtol=EXACT)
    assert any(IS_READ in reason for reason in handle.tally.left)
    assert same_gradients(model, stock)
