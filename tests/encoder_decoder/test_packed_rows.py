"""Encoder-decoders on packed rows: encoder, decoder and cross-attention keep the documents apart."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from compat.standins import flash_standin, flex_standin, set_implementation
from tests.encoder_decoder.pairs import LOGITS, SOURCES, TARGETS, Alone, Pairs, covered, named_gradients, segments

pytestmark = covered

SERVED = [
    "bart", "blenderbot", "blenderbot-small", "encoder-decoder", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus",
    "plbart", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5",
    # One half of these runs on documents alone.
    "led", "longt5", "pegasus_x", "t5gemma2",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SERVED)
def test_every_form_gives_what_documents_give_alone(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    for form in ("one_row", "two_rows", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)


@pytest.mark.parametrize("model_type", ["t5", "bart", "pegasus"])
def test_on_sdpa_in_training(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq", attn_implementation="sdpa").train()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    for form in ("one_row", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)


@pytest.mark.parametrize(
    ("model_type", "standin", "implementation"),
    [
        ("bart", flash_standin, "flash_attention_2"),
        ("bart", flex_standin, "flex_attention"),
        ("t5", flex_standin, "flex_attention"),
        ("umt5", flex_standin, "flex_attention"),
    ],
)
def test_on_kernels(model_type, standin, implementation):
    pairs = Pairs.draw()
    alone = Alone.run(tiny.build(model_type, task="seq2seq"), pairs)
    with standin():
        model = tiny.build(model_type, task="seq2seq")
        set_implementation(model, implementation)
        autopack.enable(model, verify=False)
        alone.check(pairs, "one_row", model(**pairs.one_row()), model)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_without_autopack_the_row_leaks(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    alone = Alone.run(model, pairs)
    row = {name: value for name, value in pairs.one_row().items() if "mask" not in name}
    assert alone.error(pairs.of("one_row", model(**row).logits.detach())) > 100 * LOGITS


@pytest.mark.parametrize("model_type", ["t5", "bart", "switch_transformers"])
@pytest.mark.parametrize("half", ["input_ids", "labels"])
def test_a_document_moves_nothing_but_itself(model_type, half):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    autopack.enable(model, verify=False)
    before = pairs.of("one_row", model(**pairs.one_row()).logits.detach())
    changed = pairs.one_row()
    documents = pairs.sources if half == "input_ids" else pairs.targets
    first = sum(len(d) for d in documents[:1])
    changed[half][0, first : first + len(documents[1])] += 1
    after = pairs.of("one_row", model(**changed).logits.detach())
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if number == 1:
            assert not torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_documents_of_any_length(lengths, seed):
    pairs = Pairs.draw(tuple(s for s, _ in lengths), tuple(t for _, t in lengths), seed)
    # In float32 the gradient of an embedding that many tokens share can be off by rounding alone.
    model = tiny.build("t5", task="seq2seq", dtype=torch.float64)
    alone = Alone.run(model, pairs)
    with autopack.enable(model, verify=False):
        output = model(**pairs.one_row())
        assert alone.error(pairs.of("one_row", output.logits.detach())) <= LOGITS
        output.loss.backward()
        alone.check_gradients(named_gradients(model))


@pytest.mark.parametrize("model_type", ["t5", "bart"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(model_type, reentrant):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq").train()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    other = Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)
    output = model(**pairs.one_row())
    model(**other.one_row())  # a second layout between forward and backward
    alone.check(pairs, "one_row", output, model)


def test_documents_declared_by_positions_and_by_seq_idx():
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    row = {name: value for name, value in pairs.one_row().items() if "mask" not in name}
    positions = {
        "position_ids": torch.cat([torch.arange(len(s)) for s in pairs.sources])[None],
        "decoder_position_ids": torch.cat([torch.arange(len(t)) for t in pairs.targets])[None],
    }
    alone.check(pairs, "one_row", model(**row, **positions), model)
    numbers = {"seq_idx": segments(pairs.sources)[None], "decoder_seq_idx": segments(pairs.targets)[None]}
    alone.check(pairs, "one_row", model(**row, **numbers), model)


def test_decoder_inputs_packed_by_hand_embeddings_and_encoder_states():
    pairs, model = Pairs.draw(), tiny.build("bart", task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    row = pairs.one_row()
    starts = [model.prepare_decoder_input_ids_from_labels(t[None])[0] for t in pairs.targets]
    row["decoder_input_ids"] = torch.cat(starts)[None]
    alone.check(pairs, "one_row", model(**row), model)

    embeddings = model.get_input_embeddings()
    embedded = {
        "inputs_embeds": embeddings(row["input_ids"]),
        "decoder_inputs_embeds": embeddings(row["decoder_input_ids"]),
    }
    rest = {name: value for name, value in row.items() if not name.endswith("input_ids")}
    alone.check(pairs, "one_row", model(**embedded, **rest), model)

    masks = {"attention_mask": row["attention_mask"]}
    states = model.get_encoder()(input_ids=row["input_ids"], **masks)
    rest = {name: value for name, value in row.items() if name != "input_ids"}
    alone.check(pairs, "one_row", model(encoder_outputs=states, **rest), model)


def test_the_model_without_head_and_the_encoder_alone():
    pairs, model = Pairs.draw(), tiny.build("bart", task="seq2seq")
    autopack.enable(model, verify=False)
    row = pairs.one_row()
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).last_hidden_state
    for source, packed in zip(pairs.sources, states[0].split(list(SOURCES)), strict=True):
        alone = model.get_encoder()(input_ids=source[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)
    decoded = model.model(
        input_ids=row["input_ids"],
        attention_mask=row["attention_mask"],
        decoder_input_ids=row["labels"],
        decoder_attention_mask=row["decoder_attention_mask"],
    ).last_hidden_state
    for source, target, packed in zip(pairs.sources, pairs.targets, decoded[0].split(list(TARGETS)), strict=True):
        alone = model.model(input_ids=source[None], decoder_input_ids=target[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)


def test_an_encoder_of_t5_is_an_encoder():
    config = tiny.config("t5", task="seq2seq")
    model = transformers.T5EncoderModel(config).eval()
    autopack.enable(model, verify=False)
    pairs = Pairs.draw()
    packed = model(input_ids=torch.cat(pairs.sources)[None], attention_mask=segments(pairs.sources)[None])
    for source, states in zip(pairs.sources, packed.last_hidden_state[0].split(list(SOURCES)), strict=True):
        torch.testing.assert_close(states, model(input_ids=source[None]).last_hidden_state[0], rtol=0, atol=1e-4)


def test_the_bias_is_that_of_the_longest_document():
    """A bias of the row would be dense, 1000 times as large as that of its documents here."""
    model = tiny.build("t5", task="seq2seq")
    autopack.enable(model, verify=False)
    pairs, seen = Pairs.draw((16,) * 32, (16,) * 32), []
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_bias"]), with_kwargs=True)
    model(**pairs.one_row())
    assert [bias.shape[-2:] for bias in seen] == [(16, 16)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_compiled(model_type):
    model = tiny.build(model_type, task="seq2seq", attn_implementation="sdpa")
    autopack.enable(model, verify=False)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for pairs in (Pairs.draw(), Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)):
        expected = model(**pairs.one_row()).logits
        torch.testing.assert_close(compiled(**pairs.one_row()).logits, expected, rtol=0, atol=1e-3)


class Derived(transformers.T5ForConditionalGeneration):
    """A class of one's own is what it derives from."""


def test_a_class_derived_from_one_of_transformers():
    pairs, model = Pairs.draw(), Derived(tiny.config("t5", task="seq2seq")).eval()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify=False)
    for form in ("one_row", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)
    assert autopack.audit(model, modes=("two rows",)).exact
