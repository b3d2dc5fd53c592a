"""What is read at padding counts there as it does in stock: such batches keep their padding, or the
call raises.

A batch that runs without its padding gives zeros there. A model at which nobody looks
(`packs_at_once`) shows the difference that each of these readers would make."""

import copy
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import BertModel

import autopack
from autopack import tiny
from autopack.errors import UnsupportedModel
from tests.subjects import without_dropout
from tests.support.padded import packs_at_once

EXACT, WRONG = 1e-5, 1e-3
"""Relative, of a loss in float32: rounding leaves about 1e-7, and zeros at padding change these by
1e-2 and more."""


IS_READ = "was read at padding"


def backbone(model_type="bert"):
    """Return the backbone of a tiny model in train mode."""
    model = tiny.build(model_type, task="masked-lm" if model_type == "bert" else "causal-lm")
    return model.base_model.train()


def twins(model):
    """Return a copy of a model and the model, both without dropout."""
    return copy.deepcopy(without_dropout(model)), model


def batch(model, lengths=(11, 6, 4), seed=0):
    """Return a padded batch of random tokens with its attention mask."""
    ids = tiny.tokens(model.config, len(lengths), max(lengths), seed=seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id or 0),
        "attention_mask": mask,
    }


def same_gradients(model, stock):
    """Return True if two models have the same gradients, within rounding."""
    found, wanted = (
        torch.cat([p.grad.flatten() for p in which.parameters() if p.grad is not None])
        for which in (model, stock)
    )
    return bool((found - wanted).abs().max() < EXACT * wanted.abs().max())


READERS = {
    "the mean over all columns": lambda states, mask: states.mean(1).square().sum(),
    "the last column": lambda states, mask: states[:, -1].square().sum(),
    "squares, whose slope is nothing at zero": lambda states, mask: states.square().mean(),
}
OTHERS = {
    "the mean over tokens": lambda states, mask: (
        ((states * mask[..., None]).sum(1) / mask.sum(1)[:, None]).square().sum()
    ),
    "tokens by index": lambda states, mask: states[mask.bool()].square().sum(),
    "a softmax over tokens": lambda states, mask: (
        states[..., 0].masked_fill(mask == 0, -1e9).softmax(1)[:, 0].sum()
    ),
    "labels of tokens": lambda states, mask: F.cross_entropy(
        states.transpose(1, 2), torch.where(mask.bool(), 3, -100), ignore_index=-100
    ),
}


ALL = READERS | OTHERS


def step(model, given, reads):
    """The loss of one call; its gradients are added to those of the model."""
    loss = reads(model(**given)[0], given["attention_mask"])
    loss.backward()
    return float(loss)


class Trained(namedtuple("Trained", "handle model stock given")):
    """An enabled model and stock, and a padded batch for both."""

    def steps(self, kind, count=1):
        """Whether each of some steps ran without padding; all have the loss of stock."""
        ran = []
        for _ in range(count):
            before = self.handle.tally.batches
            found, expected = (
                step(which, self.given, ALL[kind]) for which in (self.model, self.stock)
            )
            assert found == pytest.approx(expected, rel=EXACT), len(ran)
            ran.append(self.handle.tally.batches > before)
        assert same_gradients(self.model, self.stock)
        return ran

    def is_read(self):
        """How many batches were left as they came because padding is read."""
        return sum(count for reason, count in self.handle.tally.left.items() if IS_READ in reason)


def enabled(*lengths):
    stock, model = twins(backbone())
    return Trained(autopack.enable(model), model, stock, batch(model, lengths or (11, 6, 4)))


@pytest.fixture
def trained():
    found = enabled()
    with found.handle:
        yield found


@pytest.mark.parametrize("kind", READERS)
def test_who_reads_padding_gets_what_stock_gives(trained, kind):
    _, model, stock, given = trained
    assert not any(trained.steps(kind, 6))
    assert trained.is_read() == 5
    with torch.no_grad():
        assert torch.equal(model(**given)[0], stock(**given)[0]), "in evaluation too, from then on"
    model = copy.deepcopy(stock)
    packs_at_once(model)
    assert step(model, given, READERS[kind]) != pytest.approx(
        step(stock, given, READERS[kind]), rel=WRONG
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_who_reads_tokens_alone_is_served_without_padding(trained, kind):
    """The first batch, and the second, the fourth and the eighth, run as they came."""
    assert trained.steps(kind, 9) == [number not in (1, 2, 4, 8) for number in range(1, 10)]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4).filter(
        lambda found: len(set(found)) > 1
    ),
    column=st.integers(-12, 11),
    calls=st.integers(2, 4),
)
def test_whichever_column_is_read(lengths, column, calls):
    """Of some rows it may be a token, of some padding: exact in each call, and in all calls of a
    step."""
    trained = enabled(*lengths)
    column = column % max(lengths)
    for _ in range(3):
        losses = []
        for which in (trained.model, trained.stock):
            each = [which(**trained.given)[0][:, column].square().sum() for _ in range(calls)]
            torch.stack(each).sum().backward()
            losses.append(float(sum(each)))
        assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    assert bool(trained.is_read()) == (column >= min(lengths))


def test_all_calls_before_the_first_gradient_run_as_they_came(trained):
    """A step of several calls, as contrastive trainers make them, learns from none of which that
    was not known."""
    handle, model, _, given = trained
    states = [model(**given)[0] for _ in range(7)]
    assert handle.tally.batches == 0
    sum((each * given["attention_mask"][..., None]).sum() for each in states).backward()
    for _ in range(7):  # the eighth of all is looked at
        model(**given)
    assert handle.tally.batches == 6


def test_a_reader_that_begins_later_is_found_at_the_next_power_of_two(trained):
    trained.steps("the mean over tokens", 3)
    trained.steps("the mean over all columns", 4)


def test_results_without_a_gradient_keep_their_padding(trained):
    """Features of a frozen model: nothing says whether what is trained on them reads padding."""
    handle, model, stock, given = trained
    for which in (model, stock):
        which.requires_grad_(False)
    for _ in range(3):
        assert torch.equal(model(**given)[0], stock(**given)[0])
    assert any("they get no gradient" in reason for reason in handle.tally.left)
    with torch.no_grad():
        model(**given)
    assert handle.tally.batches == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_a_batch_again_as_it_was_run(trained, reentrant):
    handle, model, stock, given = trained
    embedded = model.get_input_embeddings()(given["input_ids"]).detach().requires_grad_()
    call = {"attention_mask": given["attention_mask"]}

    def checkpointed(which):
        def run(states):
            return which(inputs_embeds=states, **call)[0]

        return lambda **_: [checkpoint(run, embedded, use_reentrant=reentrant)]

    for _ in range(6):
        found, expected = (
            step(checkpointed(w), given, OTHERS["the mean over tokens"]) for w in (model, stock)
        )
        assert found == pytest.approx(expected, rel=EXACT)
    assert same_gradients(model, stock)
    assert handle.tally.batches > 0


def test_what_a_mask_hides_and_is_no_padding_keeps_its_place(trained):
    """ColBERT's queries are expanded by mask tokens that attention does not see, and that are
    scored all the same."""
    handle, model, stock, given = trained
    expanded = given | {
        "input_ids": given["input_ids"].masked_fill(given["attention_mask"] == 0, 5)
    }
    with torch.no_grad():
        found, expected = (which.eval()(**expanded)[0] for which in (model, stock))
        assert torch.equal(found, expected)
        assert any("other tokens than the pad token (5)" in reason for reason in handle.tally.left)
        model(**given)
    assert handle.tally.batches == 1


def test_answers_are_looked_for_in_all_columns_in_evaluation_too():
    """As run_qa does: the best start and end, whatever column they are in."""
    stock, model = twins(tiny.build("bert", task="question-answering").eval())
    given = batch(model)
    with torch.no_grad(), autopack.enable(model):
        assert torch.equal(model(**given).start_logits, stock(**given).start_logits)


def test_gradients_that_are_no_numbers_say_nothing(trained):
    """A scaler of losses begins so high that the first steps overflow, and infinity times a mask is
    no number."""
    handle, model, _, given = trained
    for scale in (float("inf"), float("inf"), 1.0, 1.0):
        loss = OTHERS["the mean over tokens"](model(**given)[0], given["attention_mask"])
        (loss * scale).backward()
    assert not trained.is_read()
    for _ in range(3):
        model(**given)
    assert handle.tally.batches > 0


def test_functional_gradients_keep_the_padding(trained):
    """No gradient of theirs can be looked at."""
    handle, model, stock, given = trained
    parameters = dict(model.named_parameters())

    def gradient(which):
        def loss(values):
            return torch.func.functional_call(which, values, kwargs=given)[0].mean(1).square().sum()

        return torch.func.grad(loss)(parameters)

    for _ in range(2):
        found, wanted = gradient(model), gradient(stock)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    assert handle.tally.batches == 0


# What is read at padding beside a loss of labels: the backward pass raises, or such batches keep
# their padding.


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
