"""Encoder-decoders on packed rows: encoder, decoder and cross-attention keep the documents apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from compat.standins import flash_standin, flex_standin, set_implementation
from tests.encoder_decoder.pairs import (
    LOGITS,
    SOURCES,
    TARGETS,
    WHOLE_HALVES,
    Pairs,
    alone,
    build,
    covered,
    forms_of,
    hold,
    leaks,
    result,
    worst,
)
from tests.engine import LEAK, check, counted, numbered

pytestmark = covered

SERVED = [
    "bart", "blenderbot", "blenderbot-small", "encoder-decoder", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus",
    "plbart", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5", "fsmt", "nllb-moe",
    # One half of these runs on documents alone.
    "led", "longt5", "pegasus_x", "t5gemma2",
]  # fmt: skip


@pytest.mark.parametrize("model_type", SERVED)
def test_every_form_gives_what_documents_give_alone(model_type):
    model = build(model_type)
    pairs = Pairs.for_model(model)
    expected = alone(model, pairs)
    assert leaks(model, pairs, expected, pairs.undeclared()), "control"
    autopack.enable(model, verify=False)
    hold(model, pairs, expected, *forms_of(model_type))


SDPA = {"attn_implementation": "sdpa"}
NLLB = [
    {},
    {"batch_prioritized_routing": True},
    {"normalize_router_prob_before_dropping": True},
    {"router_ignore_padding_tokens": True},
    {"moe_eval_capacity_token_fraction": -1.0},
]
IN_TRAINING = [
    ("t5", SDPA, None), ("bart", SDPA, None), ("pegasus", SDPA, None), ("fsmt", {}, None),
    *((name, {}, reentrant) for name in ("t5", "bart") for reentrant in (True, False)),
    *((name, {}, False) for name in WHOLE_HALVES),
    ("led", {"attention_window": [4, 8]}, False),
    ("longt5", {"encoder_attention_type": "transient-global"}, False),
    ("longt5", {"feed_forward_proj": "gated-gelu"}, False),
    ("pegasus_x", {"stagger_local_blocks": False}, False),
    ("prophetnet", {"ngram": 3}, False),
    ("prophetnet", {"disable_ngram_loss": True}, False),
    ("prophetnet", {"eps": 0.1}, False),
    *(("nllb-moe", options, reentrant) for options in NLLB for reentrant in (None, False)),
]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("model_type", "options", "reentrant"), IN_TRAINING)
def test_every_form_in_training_with_checkpointing(model_type, options, reentrant):
    """Without checkpointing where it is None; `enable` proves the others, whose code runs documents alone."""
    model = build(model_type, **options).train()
    pairs = Pairs.for_model(model)
    expected = alone(model, pairs)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    autopack.enable(model, verify=model_type in WHOLE_HALVES)
    if reentrant is not None and model_type in ("t5", "bart"):
        output = model(**pairs.one_row())
        model(**Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1).one_row())  # another layout before the backward
        check(result(model, pairs, "one_row", output), expected)
    hold(model, pairs, expected, *forms_of(model_type))


@pytest.mark.parametrize("options", NLLB[1:])
def test_variants_of_experts_that_take_some_tokens_of_each_document(options):
    model, pairs = build("nllb-moe", **options), Pairs.draw()
    expected = alone(model, pairs)
    autopack.enable(model, verify=False)
    hold(model, pairs, expected, *forms_of("nllb-moe"))


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
    expected = alone(build(model_type), pairs)
    with standin():
        model = build(model_type)
        set_implementation(model, implementation)
        autopack.enable(model, verify=False)
        hold(model, pairs, expected, "one_row")


BOTH = ("sources", "targets")
CHANGED = [
    *((name, (half,)) for name in ("t5", "bart", "switch_transformers") for half in BOTH),
    *((name, BOTH) for name in ("fsmt", "nllb-moe", *WHOLE_HALVES)),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("model_type", "halves"), CHANGED)
@torch.no_grad()
def test_a_document_moves_nothing_but_itself(model_type, halves):
    model = build(model_type)
    pairs = Pairs.for_model(model)
    with autopack.enable(model, verify=model_type in WHOLE_HALVES):
        before, after = (
            pairs.of("one_row", model(**each.one_row()).logits) for each in (pairs, pairs.changed(*halves))
        )
    changes = [worst([a], [b]) for a, b in zip(after, before, strict=True)]
    assert changes[1] > LEAK
    assert max(changes[:1] + changes[2:]) < (1e-5 if len(halves) == 1 else LOGITS)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_documents_of_any_length(lengths, seed):
    pairs = Pairs.draw(*zip(*lengths, strict=True), seed)
    # In float32 the gradient of an embedding that many tokens share can be off by rounding alone.
    model = build("t5", dtype=torch.float64)
    expected = alone(model, pairs)
    with autopack.enable(model, verify=False):
        hold(model, pairs, expected, "one_row")


def test_documents_declared_by_positions_and_by_seq_idx():
    pairs, model = Pairs.draw(), build("t5")
    expected = alone(model, pairs)
    autopack.enable(model, verify=False)
    for name, made in (("position_ids", counted), ("seq_idx", numbered)):
        row = {**pairs.undeclared(), name: made(SOURCES), f"decoder_{name}": made(TARGETS)}
        check(result(model, pairs, "one_row", model(**row)), expected, name)


def test_decoder_inputs_packed_by_hand_and_embeddings():
    pairs, model = Pairs.draw(), build("bart")
    expected = alone(model, pairs)
    autopack.enable(model, verify=False)
    starts = [model.prepare_decoder_input_ids_from_labels(t[None])[0] for t in pairs.targets]
    by_hand = torch.cat(starts)[None]
    hold(model, pairs, expected, "one_row", decoder_input_ids=by_hand)
    embeddings = model.get_input_embeddings()
    embedded = {"inputs_embeds": embeddings(pairs.one_row()["input_ids"]), "decoder_inputs_embeds": embeddings(by_hand)}
    hold(model, pairs, expected, "one_row", input_ids=None, **embedded)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", ["bart", "fsmt", *WHOLE_HALVES])
def test_states_that_the_caller_encoded(model_type):
    model = build(model_type)
    pairs = Pairs.for_model(model)
    expected = alone(model, pairs)
    autopack.enable(model, verify=model_type in WHOLE_HALVES)
    row = pairs.one_row()
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
    hold(
        model, pairs, expected, "one_row", encoder_outputs=states, **({} if pairs.gives_starts else {"input_ids": None})
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["fsmt", *WHOLE_HALVES])
@torch.no_grad()
def test_outputs_besides_the_logits(model_type):
    model = build(model_type)
    pairs = Pairs.for_model(model)
    row = {**pairs.one_row(), "output_hidden_states": True}
    own = {} if pairs.gives_starts else {"use_cache": False}
    each = [model(**call, output_hidden_states=True, **own) for call in pairs.each()]
    autopack.enable(model, verify=model_type in WHOLE_HALVES)
    found, as_tuple = model(**row), model(**row, return_dict=False)
    assert torch.equal(as_tuple[0], found.loss)
    assert torch.equal(as_tuple[1], found.logits)
    encoded = torch.cat([one.encoder_last_hidden_state[0] for one in each])
    assert worst([found.encoder_last_hidden_state[0]], [encoded]) < LOGITS
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        for number, states in enumerate(getattr(found, name)):
            if model_type == "pegasus_x" and name == "encoder_hidden_states":
                assert states is None or isinstance(states, tuple)  # with padding of its blocks, and global tokens
                continue
            wanted = torch.cat([getattr(one, name)[number][0] for one in each])
            assert worst([states[0]], [wanted]) < LOGITS, (name, number)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["fsmt", *WHOLE_HALVES])
def test_it_generates_as_before_and_is_left_as_it_was(model_type):
    model = build(model_type)
    pairs = Pairs.for_model(model)

    def generated() -> torch.Tensor:
        return model.generate(pairs.sources[0][None], max_new_tokens=5, do_sample=False)

    wanted = generated()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with autopack.enable(model, verify=model_type in WHOLE_HALVES):
        assert torch.equal(generated(), wanted)
        model(**pairs.one_row())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _encoder_of_t5() -> Any:
    return transformers.T5EncoderModel(tiny.config("t5", task="seq2seq")).eval()


@pytest.mark.parametrize(
    ("make", "part"), [(lambda: build("bart"), "encoder"), (lambda: build("bart"), "model"), (_encoder_of_t5, "whole")]
)
@torch.no_grad()
def test_the_model_without_head_and_the_encoder_alone(make, part):
    pairs, model = Pairs.draw(), make()
    autopack.enable(model, verify=False)
    called = {"encoder": model.get_encoder, "model": lambda: model.model, "whole": lambda: model}[part]()
    calls = [*pairs.each(), pairs.one_row()]
    for call in calls:
        target = call.pop("labels")
        if part == "model":
            call["decoder_input_ids"] = target
        else:
            call.pop("decoder_attention_mask", None)
    *own, row = (called(**call).last_hidden_state[0] for call in calls)
    assert worst(row.split(TARGETS if part == "model" else SOURCES), own) < LOGITS


def test_the_bias_is_that_of_the_longest_document():
    """A bias of the row would be dense, 1000 times as large as that of its documents here."""
    model = build("t5")
    autopack.enable(model, verify=False)
    pairs, seen = Pairs.draw((16,) * 32, (16,) * 32), []
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_bias"]), with_kwargs=True)
    model(**pairs.one_row())
    assert [bias.shape[-2:] for bias in seen] == [(16, 16)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_compiled(model_type):
    model = build(model_type, attn_implementation="sdpa")
    autopack.enable(model, verify=False)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for pairs in (Pairs.draw(), Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)):
        expected = model(**pairs.one_row()).logits
        torch.testing.assert_close(compiled(**pairs.one_row()).logits, expected, rtol=0, atol=1e-3)


class Derived(transformers.T5ForConditionalGeneration):
    """A class of one's own is what it derives from."""


def test_a_class_derived_from_one_of_transformers():
    pairs, model = Pairs.draw(), Derived(tiny.config("t5", task="seq2seq")).eval()
    expected = alone(model, pairs)
    autopack.enable(model, verify=False)
    hold(model, pairs, expected, "one_row", "padded")
    assert autopack.audit(model, modes=("two rows",)).exact
