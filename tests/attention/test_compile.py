"""torch.compile of an enabled model: one graph without a break for all layouts of one shape, exact
both ways."""

import copy
import random
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig

import autopack
from autopack import tiny
from autopack.attention.compiled import attend_compiled
from autopack.inspection.masks import Pattern
from tests.attention.written_out import LAYOUT, PATTERNS, attended, states
from tests.conftest import (
    FLOAT32,
    FLOAT64,
    LEAK,
    LENGTHS,
    OTHER_LENGTHS,
    alone,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    token_ids,
    weights_like,
)
from tests.engine import Call, mean_loss, must_be_exact
from tests.support.padded import batch, mask_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "fresh_dynamo")
COLUMNS = 24
IDS = token_ids(1, COLUMNS)
BATCHES = [
    (5, 19),
    (9, 4, 11),
    (1, 8, 8, 7),
    (3, 3, 6, 2, 10),
    (4, 4, 4, 4, 4, 4),
    (2, 9, 1, 1, 5, 2, 4),
]
"""Two to seven documents in a row of 24 tokens."""
NOT_PACKED = (COLUMNS,)


def _small():
    return llama(num_hidden_layers=1)


def _run(model, lengths):
    return model(input_ids=IDS, position_ids=positions(lengths)).logits


def _errors(model, stock, batches=BATCHES):
    return [error(_run(model, lengths), alone(stock, IDS, lengths)) for lengths in batches]


def _breaks():
    return sum(counters["graph_break"].values())


def _fixed_batches(model, steps):
    """Batches of one shape with random layouts, as the collator makes them of a token budget, and
    their documents."""
    draw = random.Random(0)
    collate = autopack.PackingCollator.for_model(
        model,
        rows=2,
        max_length=COLUMNS,
        max_documents=5,
        declare=("attention_mask", "cu_seq_lens"),
    )
    for step in range(steps):
        lengths = [draw.randint(2, 9) for _ in range(draw.randint(2, 5))]
        ids = token_ids(1, sum(lengths), seed=step)[0].split(lengths)
        yield collate([{"input_ids": each.tolist()} for each in ids]), ids


@pytest.mark.parametrize(
    ("model_type", "by_layer"),
    [
        *((name, False) for name in ("llama", "mistral", "gemma3_text", "mixtral", "qwen3")),
        ("llama", True),
    ],
)
def test_training_steps_of_one_shape_compile_once(model_type, by_layer):
    model = tiny.build(model_type, attn_implementation="sdpa").train()
    stock = copy.deepcopy(model)
    counter = CompileCounterWithBackend("eager")
    parts = model.model.layers if by_layer else [model]
    for part in parts:
        part.compile(backend=counter, fullgraph=True)
    with autopack.enable(model, verify=False):
        for step, (row, documents) in enumerate(_fixed_batches(model, 100)):
            output = model(**row)
            if step % 25:
                continue
            losses = [stock(input_ids=ids[None], labels=ids[None]).loss for ids in documents]
            expected = mean_loss(losses, [len(ids) - 1 for ids in documents])
            assert abs(output.loss - expected) < FLOAT32
            output.loss.backward()
            expected.backward()
            assert gradient_error(gradients(model), gradients(stock)) < 10 * FLOAT32
    assert 0 < counter.frame_count <= len(parts)
    assert _breaks() == 0


def test_padded_batches_of_any_lengths_take_two_graphs():
    model, stock = llama().train(), llama().train()
    counter = CompileCounterWithBackend("eager")
    draw = random.Random(0)
    with autopack.enable(model, verify=False) as handle:
        compiled = torch.compile(model, backend=counter)
        for step in range(30):
            call = batch(
                "causal LM", mask_of([draw.randint(3, 12) for _ in range(4)], columns=12), seed=step
            )
            loss, expected = compiled(**call).loss, stock(**call).loss
            assert abs(loss - expected) < FLOAT32
            loss.backward()
            expected.backward()
        assert gradient_error(gradients(model), gradients(stock)) < 10 * FLOAT32
        assert handle.tally.batches == 30
    assert counter.frame_count <= 2


def test_training_with_checkpoints_is_exact():
    model, stock = llama().train(), llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager")
    with autopack.enable(model):
        for one, other in zip(BATCHES[::2], BATCHES[1::2], strict=True):
            packed, expected = (
                [_run(compiled, n) for n in (one, other)],
                [alone(stock, IDS, n) for n in (one, other)],
            )
            sum((p * weights_like(p)).sum() for p in packed).backward()
            sum((e * weights_like(e)).sum() for e in expected).backward()
            assert gradient_error(gradients(model), gradients(stock)) <= FLOAT64


@pytest.mark.parametrize(
    ("how", "another_enabled"),
    [("torch.compile", True), ("model.compile", False), ("layers", True)],
)
def test_enabling_and_disabling_after_compiling_are_followed(how, another_enabled):
    model, stock, another = _small(), _small(), _small()
    if another_enabled:
        autopack.enable(another)
    compiled = torch.compile(model, backend="eager") if how == "torch.compile" else model
    for part in {"model.compile": [model], "layers": model.model.layers}.get(how, []):
        part.compile(backend="eager")
    few = BATCHES[1:2]
    assert min(_errors(compiled, stock, few)) > LEAK  # the graphs of the stock model are there now
    for _ in range(2):
        with autopack.enable(model):
            assert max(_errors(compiled, stock, few)) <= FLOAT64
        assert min(_errors(compiled, stock, few)) > LEAK
    if another_enabled:
        autopack.disable(another)


def test_unpacked_calls_of_a_compiled_model_are_those_of_the_stock_model():
    model, stock = _small(), _small()
    compiled = torch.compile(model, backend="aot_eager")
    with autopack.enable(model):
        for lengths in (NOT_PACKED, BATCHES[0], NOT_PACKED):
            assert error(_run(compiled, lengths), alone(stock, IDS, lengths)) <= FLOAT64
        assert compiled(input_ids=IDS).past_key_values is not None


class TestErrorsInCompiledCode:
    """Inside compiled code torch runs no exit hooks after an error: what such a forward leaves is
    never used."""

    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize(
        "whole", [True, False], ids=["the model", "the backbone under an eager top"]
    )
    def test_the_next_calls_have_their_own_layouts(self, kind, whole):
        raising = []

        def backend(graph, _):
            def run(*inputs):
                if raising:
                    raise raising.pop()
                return graph(*inputs)

            return run

        model, stock = _small(), _small()
        compiled = torch.compile(model, backend=backend) if whole else model
        if not whole:
            model.model.compile(backend=backend)
        with autopack.enable(model):
            assert max(_errors(compiled, stock, BATCHES[:3])) <= FLOAT64
            states = _states(model, BATCHES[1])
            for call in ("compiled", "eager", "backbone"):
                raising.append(kind)
                with pytest.raises(kind):
                    _run(compiled, BATCHES[0])
                if call == "backbone":
                    assert error(_states(model, BATCHES[1]), states) <= FLOAT64
                else:
                    assert (
                        max(_errors(compiled if call == "compiled" else model, stock, BATCHES[1:3]))
                        <= FLOAT64
                    )


def _states(model, lengths):
    return model.model(input_ids=IDS, position_ids=positions(lengths)).last_hidden_state


MORE = {name: each for name, each in PATTERNS.items() if each.chunk is None} | {
    "two-sided and narrower ahead": Pattern(causal=False, before=2, after=1),
}


@pytest.mark.parametrize("pattern", MORE.values(), ids=[*MORE])
def test_the_operator_has_the_gradients_of_attention_written_out(pattern):
    given = states(6, 8)
    found, expected = (
        attend_compiled(LAYOUT.cu_seqlens, *given, pattern, 0.3),
        attended(*given, pattern, 0.3),
    )
    assert error(found, expected) <= FLOAT64
    weights = weights_like(expected)
    grads = [[*torch.autograd.grad((each * weights).sum(), given)] for each in (found, expected)]
    assert gradient_error(*grads) <= FLOAT64


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "qwen3", "gemma2", "bart", "t5"])
def test_a_decoding_step_is_one_graph(model_type):
    """Generation compiles its steps with `fullgraph` where it was asked to; a token holds no two
    documents."""
    model = tiny.build(
        model_type, task="seq2seq" if model_type in ("bart", "t5") else "causal-lm"
    ).eval()
    model.generation_config.eos_token_id = None
    ids, given = (
        tiny.tokens(model.config, 2, 7),
        {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False},
    )
    expected = model.generate(ids, **given)
    compiled = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    compiled._compile_all_devices = True
    with autopack.enable(model, verify=False):
        found = model.generate(ids, **given, cache_implementation="static", compile_config=compiled)
        assert hasattr(model, "_compiled_call")
    assert torch.equal(found, expected)


def test_of_what_has_to_be_one_graph_the_reason_is_given():
    model = _small()
    with autopack.enable(model, verify=False):
        compiled = torch.compile(lambda **batch: model(**batch), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model itself"):
            compiled(input_ids=IDS, position_ids=positions(BATCHES[0]))


def test_one_token_past_the_entry_is_let_through_and_two_are_not():
    model = _small()
    with autopack.enable(model, verify=False):
        layer = model.model.layers[0]
        states = torch.randn(1, 2, model.config.hidden_size, dtype=model.dtype)
        embeddings = model.model.rotary_emb(states, torch.arange(2)[None])
        with refused("past-the-entry"):
            layer(states, position_embeddings=embeddings)
        layer(states[:, :1], position_embeddings=tuple(part[:, :1] for part in embeddings))


# torch.compile of attention modules alone, in a model that is not compiled.


def _forward(layer, backend):
    layer.self_attn.forward = torch.compile(layer.self_attn.forward, backend=backend)


def _in_its_place(layer, backend):
    layer.self_attn = torch.compile(layer.self_attn, backend=backend)


def _itself(layer, backend):
    layer.self_attn.compile(backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("compile_attention", [_forward, _in_its_place, _itself])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_attention_keeps_documents_apart(compile_attention, implementation, backend, when):
    def change(model):
        for layer in model.model.layers:
            compile_attention(layer, backend)

    calls = [
        Call(lengths=lengths, given={"use_cache": False}) for lengths in (LENGTHS, OTHER_LENGTHS)
    ]
    rows = tuple(row for call in (*calls, calls[0]) for row in call.row)
    must_be_exact(partial(llama, implementation), rows, change, when)


def test_it_is_stocks_own_code_whose_calls_need_no_checks():
    model = llama()
    with autopack.enable(model) as handle:
        _itself(model.model.layers[0], "eager")
        model(input_ids=token_ids(), position_ids=positions(LENGTHS))
        assert not handle.enabled.is_checked_closely


def _past_its_attention():
    """A compiled forward of other code has to arrive."""
    model = llama()
    attention = model.model.layers[0].self_attn

    def past_it(hidden_states, **others):
        return attention.o_proj(hidden_states.cumsum(1)), None

    attention.forward = torch.compile(past_it, backend="eager")
    return model


def _of_a_mixer():
    """Its own forward is the site, which what was compiled before goes past."""
    model = tiny.build("gptj")
    for block in model.transformer.h:
        block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    return model


@pytest.mark.parametrize("make", [_past_its_attention, _of_a_mixer])
def test_a_compiled_forward_that_goes_past_the_site_is_refused(make):
    with autopack.enable(make(), verify=False) as handle, refused("other-code"):
        handle.model(input_ids=token_ids(), position_ids=positions(LENGTHS))
