"""What would become of a call is said without running it, and is what then becomes of it."""

import logging

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import positions
from tests.enabling.test_wrapping import trainer


@pytest.fixture(autouse=True)
def _nothing_is_differentiated():
    """Whether padding is read is found out where something is
    (tests/calls/test_padding_read.py)."""
    with torch.no_grad():
        yield


MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


def tokens(rows=2, columns=9):
    return torch.arange(rows * columns).reshape(rows, columns) % 50 + 40


def labels():
    return tokens().masked_fill(MASK == 0, -100)


PACKED = {"input_ids": tokens(1), "position_ids": positions((4, 5))}
PADDED = {"input_ids": tokens(), "attention_mask": MASK}
LLAMA = ("llama", "causal-lm")
CLASSIFIER = ("bert", "sequence-classification")

UNTOUCHED = [
    (LLAMA, {}, {"input_ids": tokens()}, "it declares neither documents nor padding"),
    (LLAMA, {"unpad": False}, PADDED, "unpad=False"),
    (LLAMA, {}, {**PADDED, "use_cache": True}, "a cache is wanted"),
    (LLAMA, {}, {**PADDED, "margin_of_mine": 1.0}, "margin_of_mine is no argument"),
    (
        ("canine", "sequence-classification"),
        {},
        PADDED,
        "documents are run alone, and gain nothing",
    ),
    (
        ("t5", "seq2seq"),
        {},
        {**PADDED, "labels": labels(), "output_attentions": True},
        "attention weights are wanted",
    ),
]
OTHERWISE = [
    (LLAMA, PACKED, "runs as packed rows, each document by itself"),
    (LLAMA, {**PADDED, "labels": labels()}, "runs without its padding, as one packed row"),
    (LLAMA, {**PADDED, "logits_to_keep": 1}, "runs without its padding, as one packed row"),
    (CLASSIFIER, PADDED, "runs without its padding, as one packed row"),
    (CLASSIFIER, PACKED, "runs without its padding, as one packed row"),
    (
        ("xlnet", "sequence-classification"),
        PACKED,
        "runs on documents alone, those of one length as a batch",
    ),
    (
        ("t5", "seq2seq"),
        {**PADDED, "labels": labels()},
        "runs as one packed row of the encoder's tokens",
    ),
]


def enabled(kind, **options):
    model = tiny.build(kind[0], task=kind[1]).train()
    return model, autopack.enable(model, **options)


@pytest.mark.parametrize(
    ("kind", "options", "batch", "what", "reason"),
    [
        *(
            (kind, options, batch, "runs as it came", reason)
            for kind, options, batch, reason in UNTOUCHED
        ),
        *((kind, {}, batch, what, "") for kind, batch, what in OTHERWISE),
    ],
)
def test_what_becomes_of_a_call_and_why(kind, options, batch, what, reason, caplog):
    model, handle = enabled(kind, **options)
    found = handle.explain(**batch)
    assert found.what.startswith(what)
    assert reason in found.reason
    expected = [(d.name, d.what, d.reason) for d in found.decisions]
    assert decided(model, batch, caplog)[: len(expected)] == expected


def decided(model, batch, caplog):
    """What a call is logged to have become, at every model that it came to.

    Those come last by which autopack itself runs documents alone.
    """
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="autopack"), torch.no_grad():
        model(**batch)
    return [record.args for record in caplog.records if record.msg == "a call of %s %s, since %s"]


@pytest.mark.parametrize(
    "batch", [PACKED, PADDED, {**PADDED, "use_cache": True}, {**PACKED, "use_cache": True}]
)
@pytest.mark.parametrize("kind", [LLAMA, CLASSIFIER])
def test_nothing_is_run_counted_or_changed(kind, batch):
    model, handle = enabled(kind)
    ran = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: ran.append(type(module).__name__))
    handle.explain(**batch)  # the hooks are looked at, and are no reason to run anything
    before, attributes = handle.tally.counted(), [set(vars(module)) for module in model.modules()]
    explanation = handle.explain(**batch)
    assert not ran
    assert handle.tally.counted() == before
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert str(explanation)


def test_what_would_be_refused():
    _, handle = enabled(LLAMA)
    found = handle.explain(**PACKED, use_cache=True)
    assert found.what == "is refused"
    assert "cannot run packed rows: a cache is wanted" in found.reason
    assert "http" not in str(found)


def test_how_much_of_it_runs():
    _, handle = enabled(LLAMA)
    said = str(handle.explain(**PADDED, use_cache=False))
    assert "(2 documents, 14 real tokens in 14 columns, 4 columns of padding left out)" in said
    # by position, as for the model
    said = str(handle.explain(PACKED["input_ids"], None, PACKED["position_ids"]))
    assert "(2 documents, 9 real tokens in 9 columns)" in said


def test_a_model_that_has_changed_is_looked_at_first():
    model, handle = enabled(LLAMA)
    assert not handle.explain(**PACKED).notes
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    (note,) = handle.explain(**PACKED).notes
    assert "looked at anew" in note


def test_a_disabled_model_has_nothing_to_explain():
    model, handle = enabled(LLAMA)
    autopack.disable(model)
    with pytest.raises(ValueError, match="is disabled"):
        handle.explain(**PACKED)


@pytest.mark.parametrize("reference", [False, True])
def test_a_trainer_explains_and_counts_calls_of_its_models(tmp_path, reference):
    subject = trainer(tmp_path, ref_model=tiny.build("gpt2") if reference else None)
    batch = {**PADDED, "labels": labels()}
    with autopack.enable(subject) as handle:
        found = handle.explain(**batch)
        assert str(handle.models["model"].explain(**batch)) in str(found)
        assert found.what == "runs without its padding, as one packed row"
        assert [d.name.startswith("ref_model: GPT2") for d in found.decisions] == [True, False][
            1 - reference :
        ]
        subject.model(**batch)
        if reference:
            subject.ref_model(**batch)
        assert handle.tally.batches == 1 + reference
