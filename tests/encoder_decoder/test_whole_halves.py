"""Encoder-decoders of which one half runs on documents alone: whatever else such a call may bring."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from autopack.architectures import encoder_decoders, whole_model
from autopack.mixers import OneByOne
from tests.conftest import FLOAT32, LEAK, error
from tests.encoder_decoder.pairs import LOGITS, Alone, Pairs, covered, named_gradients

pytestmark = covered

TYPES = sorted({*encoder_decoders.WHOLE_HALF.model_types, "prophetnet"})
FORMS = {name: ("one_row", "two_rows") if name == "prophetnet" else ("one_row", "two_rows", "padded") for name in TYPES}
"""ProphetNet's streams of n-grams change with the number of columns, so its padded batches are left as they came."""
VARIANTS = [
    *((name, {}) for name in TYPES),
    ("led", {"attention_window": [4, 8]}),
    ("longt5", {"encoder_attention_type": "transient-global"}),
    ("longt5", {"feed_forward_proj": "gated-gelu"}),
    ("pegasus_x", {"stagger_local_blocks": False}),
    ("prophetnet", {"ngram": 3}),
    ("prophetnet", {"disable_ngram_loss": True}),
    ("prophetnet", {"eps": 0.1}),
]


def build(model_type: str, **options):
    return tiny.build(model_type, task="seq2seq", **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model_type", "options"), VARIANTS)
def test_variants_in_training_with_checkpointing(model_type, options):
    pairs, model = Pairs.draw(), build(model_type, **options).train()
    alone = Alone.run(model, pairs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    autopack.enable(model)
    for form in FORMS[model_type]:
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)


@pytest.mark.parametrize("model_type", TYPES)
def test_another_document_changes_nothing(model_type):
    pairs, model = Pairs.draw(), build(model_type)
    other = copy.deepcopy(pairs)
    other.sources[1], other.targets[1] = pairs.sources[1].flip(0), pairs.targets[1].flip(0)
    with torch.no_grad(), autopack.enable(model):
        before = pairs.of("one_row", model(**pairs.one_row()).logits)
        after = pairs.of("one_row", model(**other.one_row()).logits)
    changes = [error(a, b) for a, b in zip(after, before, strict=True)]
    assert changes[1] > LEAK
    assert max(changes[:1] + changes[2:]) < FLOAT32


@pytest.mark.parametrize("model_type", TYPES)
def test_without_their_half_alone_documents_see_each_other(model_type, monkeypatch):
    """The negative control: each half as the other architectures have it."""
    model = build(model_type)
    ways = [*encoder_decoders.WHOLE_HALF.mixers.values(), *whole_model.WHOLE_MODEL.mixers.values()]
    for way in {type(way) for way in ways if isinstance(way, OneByOne)}:
        monkeypatch.setattr(way, "run", lambda self, call: call.changed(lambda name, value: value))
    own = type("Own", (type(model),), {})(model.config)
    with pytest.raises((autopack.AutopackError, RuntimeError)), autopack.enable(own):  # blocks of another row's length
        own(**Pairs.draw().one_row())


@pytest.mark.parametrize("model_type", TYPES)
def test_outputs_besides_the_logits(model_type):
    pairs, model = Pairs.draw(), build(model_type)
    row = pairs.one_row()
    with torch.no_grad():
        alone = [
            model(input_ids=s[None], labels=t[None], output_hidden_states=True, use_cache=False)
            for s, t in zip(pairs.sources, pairs.targets, strict=True)
        ]
        autopack.enable(model)
        found = model(**row, output_hidden_states=True)
        as_tuple = model(**row, output_hidden_states=True, return_dict=False)
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(as_tuple[1], found.logits)
    encoded = torch.cat([each.encoder_last_hidden_state[0] for each in alone])
    assert error(found.encoder_last_hidden_state[0], encoded) < LOGITS
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        for number, states in enumerate(getattr(found, name)):
            if model_type == "pegasus_x" and name == "encoder_hidden_states":
                assert states is None or isinstance(states, tuple)  # with padding of its blocks, and global tokens
                continue
            wanted = torch.cat([getattr(each, name)[number][0] for each in alone])
            assert error(states[0], wanted) < LOGITS, (name, number)


@pytest.mark.parametrize("model_type", TYPES)
def test_states_that_the_caller_encoded(model_type):
    pairs, model = Pairs.draw(), build(model_type)
    alone = Alone.run(model, pairs)
    autopack.enable(model)
    row = pairs.one_row()
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
    output = model(**{**row, "input_ids": None}, encoder_outputs=states)
    assert alone.error(pairs.of("one_row", output.logits.detach())) < LOGITS


def test_tokens_with_global_attention_are_global_to_their_document():
    pairs, model = Pairs.draw(), build("led")
    marks = [torch.zeros_like(source).index_fill(0, torch.tensor([0, 3]), 1) for source in pairs.sources]
    outputs = [
        model(input_ids=s[None], labels=t[None], global_attention_mask=m[None], use_cache=False)
        for s, t, m in zip(pairs.sources, pairs.targets, marks, strict=True)
    ]
    counts = [len(target) for target in pairs.targets]
    loss = sum(o.loss * n for o, n in zip(outputs, counts, strict=True)) / sum(counts)
    loss.backward()
    alone = Alone([o.logits[0].detach() for o in outputs], loss.detach(), named_gradients(model))
    assert alone.error([model(input_ids=s[None], labels=t[None]).logits[0].detach()
                        for s, t in zip(pairs.sources, pairs.targets, strict=True)]) > LEAK  # fmt: skip
    autopack.enable(model)
    alone.check(pairs, "one_row", model(**pairs.one_row(), global_attention_mask=torch.cat(marks)[None]), model)


@pytest.mark.parametrize("model_type", TYPES)
def test_it_generates_as_before_and_is_left_as_it_was(model_type):
    model, source = build(model_type), Pairs.draw().sources[0][None]
    wanted = model.generate(source, max_new_tokens=5, do_sample=False)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with autopack.enable(model):
        assert torch.equal(model.generate(source, max_new_tokens=5, do_sample=False), wanted)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }


@pytest.mark.exhaustive
@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9)), min_size=2, max_size=5),
    st.sampled_from(TYPES),
    st.integers(0, 99),
)
def test_any_lengths(lengths, model_type, seed):
    pairs = Pairs.draw(*(tuple(each) for each in zip(*lengths, strict=True)), seed=seed)
    model = build(model_type)
    alone, forms = Alone.run(model, pairs), set(FORMS[model_type])
    if len(lengths) == 2 and "padded" not in forms:  # two rows of one document each: a padded batch, left to stock
        forms.remove("two_rows")
        _is_stocks(model, pairs.two_rows())
    with autopack.enable(model):
        for form in sorted(forms):
            alone.check(pairs, form, model(**getattr(pairs, form)()), model)


def _is_stocks(model, batch):
    with torch.no_grad():
        wanted = model(**batch).logits
        with autopack.enable(model):
            assert torch.equal(model(**batch).logits, wanted)


def test_what_packed_rows_have_of_the_streams_of_ngrams():
    """Those of the first n-gram are the logits; the others have a form in which documents have no place."""
    pairs, model = Pairs.draw(), build("prophetnet")
    row, padded = pairs.one_row(), pairs.padded()
    wanted = model(**padded)
    autopack.enable(model)
    found = model(**row, output_hidden_states=True)
    assert found.logits_ngram is None
    assert found.decoder_ngram_hidden_states is None
    of_padded = model(**padded)
    assert torch.equal(of_padded.logits_ngram, wanted.logits_ngram)
    assert torch.equal(of_padded.loss, wanted.loss)
