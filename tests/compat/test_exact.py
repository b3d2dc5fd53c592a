"""What has to hold in every release for the model types that compat/matrix.toml names for
scenarios.

`python -m compat.run --scenarios` runs this file in every release; an ordinary pytest run does with
the installed one."""

import copy

import pytest
import torch
import torch.nn.functional as F

import autopack
from tests.engine import Call, Result, counted, errors, ids
from tests.support.padded import batch, mask_of

TOLERANCE = 1e-3  # of gradients, relative, in fp32; a leak is of the order of 1
LEAK = 1e-3
LAYOUTS = ((7, 12, 5, 9), (20, 13))  # two layouts of one length


@pytest.fixture
def enabled(stock):
    """An enabled copy of the stock model."""
    model = copy.deepcopy(stock)
    with autopack.enable(model):
        yield model


def packed(lengths, seed):
    """The plain packed call: one row, positions that restart."""
    return {"input_ids": ids(seed, lengths), "position_ids": counted(lengths)}


def loss_sum(logits, tokens):
    """The summed next-token loss of one document."""
    return F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")


@pytest.mark.sampled(3)
def test_audit(enabled):
    """No document sees another one, whatever else the call carries."""
    report = autopack.audit(enabled)
    assert report.exact, str(report)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_gradients(stock, enabled, reentrant):
    """Checkpointed, two layouts before one backward: every parameter gets the gradient of separate
    documents."""
    enabled.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    # Reentrant checkpointing needs an input that requires a gradient.
    enabled.enable_input_require_grads()
    results = []
    for model in (stock.train(), enabled.train()):
        outputs, losses = [], []
        for seed, lengths in enumerate(LAYOUTS):
            row = packed(lengths, seed)
            tokens = row["input_ids"].split(lengths, dim=1)
            if model is enabled:
                outputs += model(**row).logits.split(lengths, dim=1)
            else:
                outputs += [model(input_ids=part, use_cache=False).logits for part in tokens]
            # Targets never cross from one document to the next.
            losses += map(loss_sum, outputs[-len(tokens) :], tokens)
        results.append(Result.of(model, outputs, sum(losses)))
    worst = max(errors(results[1], results[0]).values())
    assert worst <= TOLERANCE


def test_padded(stock, enabled):
    """A padded batch, unpadded inside, gives the logits, loss and gradients of the padded run."""
    worst = []
    for side in ("right", "left"):
        inputs, results = batch("causal LM", mask_of(LAYOUTS[0], side), seed=5), []
        for model in (enabled, stock):
            output = model.train()(**inputs)
            results.append(
                Result.of(model, [output.logits[inputs["attention_mask"].bool()]], output.loss)
            )
        worst += errors(*results).values()
    assert max(worst) <= TOLERANCE
    tally = autopack.enable(enabled).tally
    assert (tally.batches, tally.left) == (2, {}), str(tally)


def test_disable(stock):
    """After `disable` the model is what it was, attributes, hooks and forwards, and gives bit for
    bit what it gave."""

    def state():
        return [
            (set(vars(m)), list(m._forward_pre_hooks), list(m._forward_hooks))
            for m in stock.modules()
        ]

    row = packed(LAYOUTS[0], seed=2)
    calls = ({"input_ids": row["input_ids"]}, row)
    # some releases leave forwards on layers whose outputs they collect
    stock(**row, output_hidden_states=True)
    before, found = [stock(**call).logits for call in calls], state()
    autopack.enable(stock)
    assert autopack.is_enabled(stock)
    stock(**row)
    autopack.disable(stock)
    assert not autopack.is_enabled(stock)
    assert state() == found
    after = [stock(**call).logits for call in calls]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert state() == found


@pytest.mark.sampled(3)
def test_control(stock):
    """The stock model leaks in a plain call and the auditor sees it: `test_audit` does not pass by
    chance."""
    call = Call(labels=None, lengths=LAYOUTS[0])
    with torch.no_grad():
        leak = errors(call.packed(stock), call.alone(stock))["states"]
    if leak < 1e-5:
        pytest.skip(f"this transformers has become exact for a plain packed call ({leak:.0e})")
    assert leak > LEAK
    assert not autopack.audit(stock).exact
