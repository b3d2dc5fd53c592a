"""What has to hold in every release for the model types that compat/matrix.toml names for scenarios.

`python -m compat.run --scenarios` runs this file in every release; an ordinary pytest run does with the installed one.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import autopack
from tests.engine import Call, counted, errors, gradients, ids
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


def packed_loss(model, lengths, seed):
    """The summed loss of a packed row; the targets never cross from one document to the next."""
    row = packed(lengths, seed)
    parts = zip(model(**row).logits.split(lengths, dim=1), row["input_ids"].split(lengths, dim=1), strict=True)
    return torch.stack([loss_sum(own, part) for own, part in parts]).sum()


@pytest.mark.sampled(3)
def test_audit(enabled, record_property):
    """No document sees another one, whatever else the call carries."""
    report = autopack.audit(enabled)
    record_property("worst", float(report.worst))
    assert report.exact, str(report)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_gradients(
    stock,
    enabled,
    reentrant,
    record_property,
):
    """Checkpointed, two layouts before one backward: every parameter gets the gradient of separate documents."""
    stock.train()
    for seed, lengths in enumerate(LAYOUTS):
        for part in ids(seed, lengths).split(lengths, dim=1):
            loss_sum(stock(input_ids=part, use_cache=False).logits, part).backward()
    wanted = gradients(stock)

    enabled.train()
    enabled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    # Reentrant checkpointing needs an input that requires a gradient.
    enabled.enable_input_require_grads()
    sum(packed_loss(enabled, lengths, seed) for seed, lengths in enumerate(LAYOUTS)).backward()
    found = gradients(enabled)

    assert found.keys() == wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    errors = {}
    for name, gradient in wanted.items():
        # A key bias, for one, has a true gradient of 0: what is left there is rounding, so it only has to stay small.
        true_zero = float(gradient.norm()) < 1e-5 * largest
        errors[name] = float((found[name] - gradient).norm()) / (largest if true_zero else float(gradient.norm()))
    worst = max(errors, key=lambda name: errors[name])
    record_property("worst", errors[worst])
    assert errors[worst] <= TOLERANCE, f"{worst}: the gradient is off by {errors[worst]:.1e} of its norm"


def test_padded(stock, enabled, record_property):
    """A padded batch, unpadded inside, gives the logits, loss and gradients of the padded run."""
    errors = []
    for side in ("right", "left"):
        inputs = batch("causal LM", mask_of(LAYOUTS[0], side), seed=5)
        real = inputs["attention_mask"].bool()
        outputs, grads = [], []
        for model in (stock, enabled):
            model.train()
            outputs.append(model(**inputs))
            outputs[-1].loss.backward()
            grads.append(gradients(model))
        wanted, found = outputs
        found_logits, wanted_logits = found.logits.detach(), wanted.logits.detach()[real]
        errors.append(float((found_logits[real] - wanted_logits).abs().max() / wanted_logits.std()))
        errors.append(float(((found.loss - wanted.loss).abs() / wanted.loss).detach()))
        assert (found_logits[~real] == found_logits[real][0]).all(), "a batch without its padding has copies there"
        largest = max(float(gradient.norm()) for gradient in grads[0].values())
        errors += [float((grads[1][name] - gradient).norm()) / largest for name, gradient in grads[0].items()]
    record_property("worst", max(errors))
    assert max(errors) <= TOLERANCE
    tally = autopack.enable(enabled).tally
    assert (tally.batches, tally.left) == (2, {}), str(tally)


def test_disable(stock):
    """After `disable` the model is what it was, attributes, hooks and forwards, and gives bit for bit what it gave."""

    def state():
        return [(set(vars(m)), list(m._forward_pre_hooks), list(m._forward_hooks)) for m in stock.modules()]

    row = packed(LAYOUTS[0], seed=2)
    calls = ({"input_ids": row["input_ids"]}, row)
    stock(**row, output_hidden_states=True)  # some releases leave forwards on layers whose outputs they collect
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
def test_control(stock, record_property):
    """The stock model leaks in a plain call and the auditor sees it: `test_audit` does not pass by chance."""
    call = Call(labels=None, lengths=LAYOUTS[0])
    with torch.no_grad():
        leak = errors(call.packed(stock), call.alone(stock))["states"]
    record_property("worst", leak)
    if leak < 1e-5:
        pytest.skip(f"this transformers has become exact for a plain packed call ({leak:.0e})")
    assert leak > LEAK
    assert not autopack.audit(stock).exact
