"""torch.compile of an enabled model: one graph without a break for all layouts of one shape, exact both ways."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig

import autopack
from autopack import tiny
from autopack.attention.compiled import attend_compiled
from autopack.inspection.masks import Pattern
from autopack.layout.packed import PackedLayout
from tests.conftest import (
    FLOAT32,
    FLOAT64,
    LEAK,
    alone,
    error,
    gradient_error,
    gradients,
    llama,
    positions,
    token_ids,
    weights_like,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
COLUMNS = 24
IDS = token_ids(1, COLUMNS)
BATCHES = [(5, 19), (9, 4, 11), (1, 8, 8, 7), (3, 3, 6, 2, 10), (4, 4, 4, 4, 4, 4), (2, 9, 1, 1, 5, 2, 4)]
"""Two to seven documents in a row of 24 tokens."""
NOT_PACKED = (COLUMNS,)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _small():
    return llama(num_hidden_layers=1)


def _run(model, lengths):
    return model(input_ids=IDS, position_ids=positions(lengths)).logits


def _errors(model, stock, batches=BATCHES):
    return [error(_run(model, lengths), alone(stock, IDS, lengths)) for lengths in batches]


def _breaks():
    return sum(counters["graph_break"].values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_two_graphs_without_a_break_serve_every_layout(backend):
    model, stock = llama(), llama()
    counter = CompileCounterWithBackend(backend)
    compiled, graphs = torch.compile(model, backend=counter), []
    with autopack.enable(model):
        for lengths in BATCHES:
            assert error(_run(compiled, lengths), alone(stock, IDS, lengths)) <= FLOAT64
            graphs.append(counter.frame_count)
    assert graphs[0] == 1
    assert max(graphs) == graphs[1] <= 2
    assert _breaks() == 0


def _fixed_batches(model, steps):
    """Batches of one shape with random layouts, as the collator makes them of a token budget, and their documents."""
    draw = random.Random(0)
    collate = autopack.PackingCollator.for_model(
        model, rows=2, max_length=COLUMNS, max_documents=5, declare=("attention_mask", "cu_seq_lens")
    )
    for step in range(steps):
        lengths = [draw.randint(2, 9) for _ in range(draw.randint(2, 5))]
        ids = token_ids(1, sum(lengths), seed=step)[0].split(lengths)
        yield collate([{"input_ids": each.tolist()} for each in ids]), ids


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "mixtral", "qwen3"])
def test_training_steps_of_one_shape_compile_once(model_type):
    model = tiny.build(model_type, attn_implementation="sdpa").train()
    stock = copy.deepcopy(model)
    counter = CompileCounterWithBackend("eager")
    with autopack.enable(model, verify=False):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for step, (batch, documents) in enumerate(_fixed_batches(model, 100)):
            output = compiled(**batch)
            output.loss.backward()
            if step % 25:
                continue
            losses = [stock(input_ids=ids[None], labels=ids[None]).loss for ids in documents]
            weights = torch.tensor([len(ids) - 1.0 for ids in documents])
            expected = (torch.stack(losses) * weights).sum() / weights.sum()
            assert abs(output.loss - expected) < FLOAT32
            model.zero_grad()
            compiled(**batch).loss.backward()
            expected.backward()
            assert gradient_error(gradients(model), gradients(stock)) < 10 * FLOAT32
            stock.zero_grad()
            model.zero_grad()
    assert counter.frame_count == 1
    assert _breaks() == 0


@pytest.mark.exhaustive
def test_padded_batches_of_any_lengths_take_two_graphs():
    model, stock = llama().train(), llama().train()
    counter = CompileCounterWithBackend("eager")
    draw = random.Random(0)
    handle = autopack.enable(model, verify=False)
    with handle:
        compiled = torch.compile(model, backend=counter)
        for step in range(30):
            lengths = torch.tensor([draw.randint(3, 12) for _ in range(4)])
            mask = (torch.arange(12) < lengths[:, None]).long()
            ids = token_ids(4, 12, seed=step) * mask
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
            loss, expected = compiled(**batch).loss, stock(**batch).loss
            assert abs(loss - expected) < FLOAT32
            loss.backward()
            expected.backward()
        assert gradient_error(gradients(model), gradients(stock)) < 10 * FLOAT32
        assert handle.tally.batches == 30
    assert counter.frame_count <= 2


@pytest.mark.exhaustive
def test_chunks_are_exact_although_dynamo_cannot_read_their_mask():
    model = tiny.build("llama4_text", attn_implementation="sdpa")
    stock = copy.deepcopy(model)
    counter = CompileCounterWithBackend("eager")
    with autopack.enable(model, verify=False):
        compiled, graphs = torch.compile(model, backend=counter), []
        for lengths in BATCHES[:4]:
            assert error(_run(compiled, lengths), alone(stock, IDS, lengths)) <= FLOAT32
            graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[-2]  # more graphs, but none per layout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_training_is_exact(checkpointing):
    model, stock = llama().train(), llama()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    with autopack.enable(model):
        for one, other in zip(BATCHES[::2], BATCHES[1::2], strict=True):
            packed, expected = [_run(compiled, n) for n in (one, other)], [alone(stock, IDS, n) for n in (one, other)]
            sum((p * weights_like(p)).sum() for p in packed).backward()
            sum((e * weights_like(e)).sum() for e in expected).backward()
            assert gradient_error(gradients(model), gradients(stock)) <= FLOAT64
    if not checkpointing:
        assert counter.frame_count <= 2
        assert _breaks() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "another_enabled"), [("torch.compile", True), ("model.compile", False), ("layers", True)]
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


def test_compiled_layers_inside_an_eager_model_are_exact_and_few():
    model, stock = llama(), llama()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    with autopack.enable(model):
        assert max(_errors(model, stock)) <= FLOAT64
    assert counter.frame_count <= 2 * len(model.model.layers)


def test_layers_compiled_one_by_one_are_compiled_once_for_one_shape():
    model = tiny.build("llama", attn_implementation="sdpa").train()
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    with autopack.enable(model, verify=False):
        for batch, _ in _fixed_batches(model, 40):
            model(**batch).loss.backward()
    assert counter.frame_count <= len(model.model.layers)


def test_a_compiled_copy_is_exact_on_its_own():
    model, stock = _small(), _small()
    autopack.enable(model)
    other = copy.deepcopy(model)
    autopack.disable(model)
    assert max(_errors(torch.compile(other, backend="eager"), stock, BATCHES[:2])) <= FLOAT64
    autopack.disable(other)


class TestErrorsInCompiledCode:
    """Inside compiled code torch runs no exit hooks after an error: what such a forward leaves is never used."""

    @pytest.fixture
    def failing(self):
        """A backend whose graphs raise while the list holds an exception."""
        raising: list[type[BaseException]] = []

        def backend(graph, _):
            def run(*inputs):
                if raising:
                    raise raising.pop()
                return graph(*inputs)

            return run

        return backend, raising

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
    def test_the_next_calls_have_their_own_layouts(self, failing, kind):
        backend, raising = failing
        model, stock = _small(), _small()
        compiled = torch.compile(model, backend=backend)
        with autopack.enable(model):
            assert max(_errors(compiled, stock, BATCHES[:2])) <= FLOAT64
            states = model.model(input_ids=IDS, position_ids=positions(BATCHES[1])).last_hidden_state
            for call in ("compiled", "eager", "backbone"):
                raising.append(kind)
                with pytest.raises(kind):
                    _run(compiled, BATCHES[0])
                if call == "backbone":
                    found = model.model(input_ids=IDS, position_ids=positions(BATCHES[1])).last_hidden_state
                    assert torch.equal(found, states)
                else:
                    assert max(_errors(compiled if call == "compiled" else model, stock, BATCHES[1:3])) <= FLOAT64

    @pytest.mark.exhaustive
    def test_a_compiled_backbone_under_an_eager_top(self, failing):
        backend, raising = failing
        model, stock = _small(), _small()
        model.model.compile(backend=backend)
        with autopack.enable(model):
            assert max(_errors(model, stock, BATCHES[:3])) <= FLOAT64
            states = model.model(input_ids=IDS, position_ids=positions(BATCHES[1])).last_hidden_state
            raising.append(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                _run(model, BATCHES[0])
            found = model.model(input_ids=IDS, position_ids=positions(BATCHES[1])).last_hidden_state
            assert error(found, states) <= FLOAT64
            stop = model.lm_head.register_forward_pre_hook(_interrupt)
            with pytest.raises(KeyboardInterrupt):
                _run(model, BATCHES[0])
            stop.remove()
            found = model.model(input_ids=IDS, position_ids=positions(BATCHES[1])).last_hidden_state
            assert error(found, states) <= FLOAT64


def _interrupt(module, args):
    raise KeyboardInterrupt


PATTERNS = {
    "causal": Pattern(causal=True),
    "bidirectional": Pattern(causal=False),
    "window": Pattern(causal=True, before=3),
    "two-sided window": Pattern(causal=False, before=2, after=1),
    "chunks": Pattern(causal=True, chunk=4),
    "window in chunks": Pattern(causal=True, before=1, chunk=5),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("queries", [3, 512], ids=["in blocks", "whole"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_the_operator_has_the_gradients_of_attention_written_out(pattern, queries, monkeypatch):
    monkeypatch.setattr("autopack.attention.compiled._QUERIES", queries)
    layout = PackedLayout.from_lengths([[5, 1, 9], [8, 7]])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 15, size, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, size in ((4, 6), (2, 6), (2, 8))
    )
    found = attend_compiled(layout.cu_seqlens, query, key, value, pattern, 0.3)
    expected = _dense(layout, query, key, value, pattern, 0.3)
    assert error(found, expected) <= FLOAT64
    weights = weights_like(expected)
    grads = [torch.autograd.grad((o * weights).sum(), (query, key, value)) for o in (found, expected)]
    assert gradient_error(list(grads[0]), list(grads[1])) <= FLOAT64


def _dense(layout, query, key, value, pattern, scale):
    number, offset = layout.seq_idx, layout.position_ids()
    distance = offset[:, :, None] - offset[:, None, :]
    seen = number[:, :, None] == number[:, None, :]
    if pattern.causal:
        seen &= distance >= 0
    if pattern.before is not None:
        seen &= distance <= pattern.before
    if pattern.after is not None:
        seen &= -distance <= pattern.after
    if pattern.chunk is not None:
        seen &= offset[:, :, None] // pattern.chunk == offset[:, None, :] // pattern.chunk
    key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "qwen3", "gemma2", "bart", "t5"])
def test_a_decoding_step_is_one_graph(model_type):
    """Generation compiles its steps with `fullgraph` where it was asked to; a token holds no two documents."""
    model = _generating(model_type)
    ids, given = tiny.tokens(model.config, 2, 7), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **given)
    compiled = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    compiled._compile_all_devices = True
    with autopack.enable(model, verify=False):
        found = model.generate(ids, **given, cache_implementation="static", compile_config=compiled)
        assert hasattr(model, "_compiled_call")
    assert torch.equal(found, expected)


def _generating(model_type):
    pair = model_type in ("bart", "t5")
    model = tiny.build(model_type, task="seq2seq" if pair else "causal-lm").eval()
    model.generation_config.eos_token_id = None
    return model


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
