"""FSMT: both halves on documents alone, whatever such a call may bring."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from autopack.architectures import encoder_decoders
from tests.conftest import LEAK, error
from tests.encoder_decoder.pairs import LOGITS, Alone, Pairs, covered, named_gradients, pad
from tests.support.refusals import refused

pytestmark = covered


def build(**options):
    return tiny.build("fsmt", task="seq2seq", **options)


def starts(pairs: Pairs) -> list[torch.Tensor]:
    """The decoder's tokens of each document: the last label first, as the model has it."""
    return [target.roll(1) for target in pairs.targets]


def each(pairs: Pairs) -> Iterator[dict[str, Any]]:
    for source, target, start in zip(pairs.sources, pairs.targets, starts(pairs), strict=True):
        yield {"input_ids": source[None], "labels": target[None], "decoder_input_ids": start[None]}


def alone_of(model, pairs: Pairs) -> Alone:
    outputs, counts = [model(**given) for given in each(pairs)], [len(target) for target in pairs.targets]
    loss = sum(output.loss * count for output, count in zip(outputs, counts, strict=True)) / sum(counts)
    loss.backward()
    return Alone([output.logits[0].detach() for output in outputs], loss.detach(), named_gradients(model))


def packed(pairs: Pairs, form: str) -> dict[str, torch.Tensor]:
    rows = getattr(pairs, form)()
    tokens = starts(pairs)
    if form == "padded":
        return {**rows, "decoder_input_ids": pad(tokens, 1)}
    if form == "two_rows":
        return {**rows, "decoder_input_ids": pad([tokens[0], torch.cat(tokens[1:])], 1)}
    return {**rows, "decoder_input_ids": torch.cat(tokens)[None]}


@pytest.mark.parametrize("form", ["one_row", "two_rows", "padded"])
@pytest.mark.parametrize("training", [False, True])
def test_every_form_gives_what_documents_give_alone(form, training):
    pairs, model = Pairs.draw(), build().train(training)
    alone = alone_of(model, pairs)
    autopack.enable(model, verify=False)
    alone.check(pairs, form, model(**packed(pairs, form)), model)


@pytest.mark.parametrize("half", ["FSMTEncoder", "FSMTDecoder"])
def test_without_a_half_alone_documents_see_each_other(half, monkeypatch):
    """The negative control: one half on the row as it is."""
    way = type("_AsItIs", (type(encoder_decoders.FSMT.mixers[half]),), {"run": lambda self, call: as_it_is(call)})
    monkeypatch.setitem(encoder_decoders.FSMT.mixers, half, way("none"))

    def as_it_is(call):
        return call.original(call.mixer, **call.arguments)

    pairs, model = Pairs.draw(), build()
    alone = alone_of(model, pairs)
    autopack.enable(model, verify=False)
    assert alone.error(pairs.of("one_row", model(**packed(pairs, "one_row")).logits.detach())) > LEAK


def test_another_document_changes_nothing():
    pairs, model = Pairs.draw(), build()
    other = copy.deepcopy(pairs)
    other.sources[1], other.targets[1] = pairs.sources[1].flip(0), pairs.targets[1].flip(0)
    with torch.no_grad(), autopack.enable(model, verify=False):
        before = pairs.of("one_row", model(**packed(pairs, "one_row")).logits)
        after = pairs.of("one_row", model(**packed(other, "one_row")).logits)
    changes = [error(a, b) for a, b in zip(after, before, strict=True)]
    assert changes[1] > LEAK
    assert max(changes[:1] + changes[2:]) < LOGITS


@pytest.mark.parametrize("use_cache", [None, False])
def test_without_labels_it_hides_later_tokens_where_stock_does(use_cache):
    """Stock makes no mask where it may fill a cache: a document without labels gets something else than with them."""
    pairs, model = Pairs.draw(), build()
    options = {} if use_cache is None else {"use_cache": use_cache}
    calls = [{name: value for name, value in given.items() if name != "labels"} for given in each(pairs)]
    with torch.no_grad():
        wanted = [model(**call, **options).logits[0] for call in calls]
        with_labels = [model(**given).logits[0] for given in each(pairs)]
        autopack.enable(model, verify=False)
        row = {name: value for name, value in packed(pairs, "one_row").items() if name != "labels"}
        found = pairs.of("one_row", model(**row, **options).logits)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < LOGITS
    changed = max(error(a, b) for a, b in zip(with_labels, wanted, strict=True))
    assert changed > LEAK if use_cache is None else changed < LOGITS


def test_the_audit_finds_it_exact_whatever_its_cache_hides():
    model = build()
    assert model.config.use_cache
    autopack.enable(model, verify=False)
    report = autopack.audit(model)
    assert report.exact, report
    assert "use_cache=False" in report.notes["documents alone"]


def test_outputs_besides_the_logits():
    pairs, model = Pairs.draw(), build()
    row = packed(pairs, "one_row")
    with torch.no_grad():
        alone = [model(**given, output_hidden_states=True) for given in each(pairs)]
        autopack.enable(model, verify=False)
        found = model(**row, output_hidden_states=True)
        as_tuple = model(**row, output_hidden_states=True, return_dict=False)
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(as_tuple[1], found.logits)
    assert (
        error(found.encoder_last_hidden_state[0], torch.cat([a.encoder_last_hidden_state[0] for a in alone])) < LOGITS
    )
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        for number, states in enumerate(getattr(found, name)):
            assert error(states[0], torch.cat([getattr(a, name)[number][0] for a in alone])) < LOGITS, (name, number)


def test_states_that_the_caller_encoded():
    pairs, model = Pairs.draw(), build()
    alone = alone_of(model, pairs)
    autopack.enable(model, verify=False)
    row = packed(pairs, "one_row")
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
    alone.check(pairs, "one_row", model(**row, encoder_outputs=states), model)


def test_what_its_collator_makes_of_batches_runs_as_it_came():
    pairs, model = Pairs.draw(), build()
    features = [
        {"input_ids": s.tolist(), "attention_mask": [1] * len(s), "decoder_input_ids": d.tolist(), "labels": t.tolist()}
        for s, t, d in zip(pairs.sources, pairs.targets, starts(pairs), strict=True)
    ]
    batch = {
        name: pad([torch.tensor(f[name]) for f in features], {"labels": -100, "attention_mask": 0}.get(name, 1))
        for name in features[0]
    }
    wanted = model(**batch)
    autopack.enable(model, verify=False)
    found = model(**batch)
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.loss, wanted.loss)


def test_tokens_that_it_would_take_from_the_encoder_are_refused():
    model = build()
    autopack.enable(model, verify=False)
    with refused("decoder-tokens"):
        model(**Pairs.draw().one_row())


def test_it_generates_as_before_and_is_left_as_it_was():
    model, source = build(), Pairs.draw().sources[0][None]
    wanted = model.generate(source, max_new_tokens=5, do_sample=False)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with autopack.enable(model, verify=False):
        assert torch.equal(model.generate(source, max_new_tokens=5, do_sample=False), wanted)
        model(**packed(Pairs.draw(), "one_row"))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
