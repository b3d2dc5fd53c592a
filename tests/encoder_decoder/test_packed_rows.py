"""Encoder-decoders on packed rows: encoder, decoder and cross-attention keep the documents
apart."""

import pytest
import torch
import transformers

import autopack
from autopack import tiny
from autopack.architectures import encoder_decoders, whole_model
from autopack.mixers import OneByOne
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
    of_outputs,
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


NLLB = [
    {},
    {"batch_prioritized_routing": True},
    {"normalize_router_prob_before_dropping": True},
    {"router_ignore_padding_tokens": True},
    {"moe_eval_capacity_token_fraction": -1.0},
]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [*((name, {}) for name in SERVED), *(("nllb-moe", options) for options in NLLB[1:])],
    ids=str,
)
def test_every_form_gives_what_documents_give_alone(model_type, options):
    model = build(model_type, **options)
    pairs = Pairs.for_model(model)
    expected = alone(model, pairs)
    assert leaks(model, pairs, expected, pairs.undeclared()), "control"
    autopack.enable(model, verify=False)
    hold(model, pairs, expected, *forms_of(model_type))


SDPA = {"attn_implementation": "sdpa"}
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


@pytest.mark.parametrize(("model_type", "options", "reentrant"), IN_TRAINING)
def test_every_form_in_training_with_checkpointing(model_type, options, reentrant):
    """Without checkpointing where it is None; `enable` proves the others, whose code runs documents
    alone."""
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
        # another layout before the backward
        model(**Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1).one_row())
        check(result(model, pairs, "one_row", output), expected)
    hold(model, pairs, expected, *forms_of(model_type))


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


def test_padded_batches_by_flash_kernels_run_without_padding_that_stock_lets_decoders_see():
    """Stock's padded batch says nothing there, so its first check compares nothing with it."""
    pairs = Pairs.draw()
    with flash_standin():
        model = build("bart")
        set_implementation(model, "flash_attention_2")
        seen = model(**pairs.padded()).logits
        handle = autopack.enable(model)
        logits = model(**pairs.padded()).logits
        assert float((logits - seen).detach().abs().max()) > 1e-2 * float(seen.detach().std())
    assert handle.enabled.proof.why_not_unpadded is None
    assert handle.enabled.live.checked.leaks == 0 < handle.enabled.live.checked.checks


def _declared(name, made):
    return lambda model, pairs: {
        **pairs.undeclared(),
        name: made(SOURCES),
        f"decoder_{name}": made(TARGETS),
    }


def _decoder_inputs_by_hand(model, pairs):
    starts = [
        model.prepare_decoder_input_ids_from_labels(target[None])[0] for target in pairs.targets
    ]
    return pairs.one_row() | {"decoder_input_ids": torch.cat(starts)[None]}


def _embedded(model, pairs):
    embeddings, row = model.get_input_embeddings(), _decoder_inputs_by_hand(model, pairs)
    ids, starts = (row.pop(name) for name in ("input_ids", "decoder_input_ids"))
    return row | {"inputs_embeds": embeddings(ids), "decoder_inputs_embeds": embeddings(starts)}


def _encoded(model, pairs):
    """States that the caller encoded."""
    row = pairs.one_row()
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
    return row | {"encoder_outputs": states} | ({} if pairs.gives_starts else {"input_ids": None})


WAYS = [
    ("t5", _declared("position_ids", counted)),
    ("t5", _declared("seq_idx", numbered)),
    ("bart", _decoder_inputs_by_hand),
    ("bart", _embedded),
    *((name, _encoded) for name in ("bart", "fsmt", *WHOLE_HALVES)),
]


@pytest.mark.parametrize(("model_type", "way"), WAYS)
def test_other_ways_to_give_a_row(model_type, way):
    model = build(model_type)
    pairs = Pairs.for_model(model)
    expected = alone(model, pairs)
    autopack.enable(model, verify=model_type in WHOLE_HALVES)
    check(result(model, pairs, "one_row", model(**way(model, pairs))), expected)


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
                # with padding of its blocks, and global tokens
                assert states is None or isinstance(states, tuple)
                continue
            wanted = torch.cat([getattr(one, name)[number][0] for one in each])
            assert worst([states[0]], [wanted]) < LOGITS, (name, number)


def _encoder_of_t5():
    return transformers.T5EncoderModel(tiny.config("t5", task="seq2seq")).eval()


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: build("bart"), "encoder"),
        (lambda: build("bart"), "model"),
        (_encoder_of_t5, "whole"),
    ],
)
@torch.no_grad()
def test_the_model_without_head_and_the_encoder_alone(make, part):
    pairs, model = Pairs.draw(), make()
    autopack.enable(model, verify=False)
    called = {"encoder": model.get_encoder, "model": lambda: model.model, "whole": lambda: model}[
        part
    ]()
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
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_bias"]), with_kwargs=True
    )
    model(**pairs.one_row())
    assert [bias.shape[-2:] for bias in seen] == [(16, 16)]


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_compiled(model_type):
    model = build(model_type, attn_implementation="sdpa")
    autopack.enable(model, verify=False)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for pairs in (Pairs.draw(), Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)):
        expected = model(**pairs.one_row()).logits
        torch.testing.assert_close(compiled(**pairs.one_row()).logits, expected, rtol=0, atol=1e-3)


# Encoder-decoders of which one half runs on documents alone: whatever else such a call may bring.

ROUTER = encoder_decoders.NLLB_MOE.mixers["NllbMoeTop2Router"]


def as_it_is(way, call):
    """What the other architectures have: the row as it came."""
    return call.changed(lambda name, value: None if name == "padding_mask" else value)


@pytest.mark.parametrize("model_type", [*WHOLE_HALVES, "nllb-moe", "fsmt"])
def test_without_what_runs_alone_documents_see_each_other(model_type, monkeypatch):
    """The negative control; a proof sees it, too."""
    model = build(model_type)
    families = [getattr(encoder_decoders, name) for name in ("WHOLE_HALF", "FSMT", "NLLB_MOE")]
    ways = [
        way for family in (*families, whole_model.WHOLE_MODEL) for way in family.mixers.values()
    ]
    for kind in {type(way) for way in ways if isinstance(way, (OneByOne, type(ROUTER)))}:
        monkeypatch.setattr(kind, "run", as_it_is)
    own = type("Own", (type(model),), {})(model.config)
    # blocks of another row's length
    with pytest.raises((autopack.AutopackError, RuntimeError)), autopack.enable(own):
        own(**Pairs.for_model(model).one_row())


def test_tokens_with_global_attention_are_global_to_their_document():
    pairs, model = Pairs.draw(), build("led")
    marks = [
        torch.zeros_like(source).index_fill(0, torch.tensor([0, 3]), 1) for source in pairs.sources
    ]
    calls = zip(pairs.each(), marks, strict=True)
    expected = of_outputs(
        model,
        [model(**call, global_attention_mask=m[None], use_cache=False) for call, m in calls],
        pairs,
    )
    assert worst(alone(model, pairs).documents, expected.documents) > LEAK, "control"
    autopack.enable(model)
    hold(model, pairs, expected, "one_row", global_attention_mask=torch.cat(marks)[None])


def test_what_packed_rows_have_of_the_streams_of_ngrams():
    """Those of the first n-gram are the logits; the others have a form in which documents have no
    place."""
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
