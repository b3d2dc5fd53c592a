"""Configurations in which models look at the row in another way than as they come: exact, and not without what makes
them so."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import autopack
from autopack import registry, tiny
from autopack.architectures import own_attention, quirks, recurrent, whole_model
from autopack.calls import rows as packed
from autopack.layout.packed import PackedLayout
from autopack.mixers import OneByOne
from tests.conftest import FLOAT32, FLOAT64, LEAK, alone, error, gradient_error, gradients, positions, weights_like
from tests.support.refusals import refused

ROWS = ((7, 12, 5, 9), (9, 5, 12, 7))
INKLING = {"log_scaling_n_floor": 4}
REORDERED = {"reorder_and_upcast_attn": True}
CHUNKS = {"lsh_attn_chunk_length": 4, "lsh_num_chunks_before": 1, "local_attn_chunk_length": 4}
CHUNKS |= {"local_num_chunks_before": 1}


def without(monkeypatch: pytest.MonkeyPatch, family: autopack.registry.Family, **parts: object) -> None:
    """Serve the types of a family without some of what it has."""
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(family, **parts)])


def packed_error(model, *rows: tuple[int, ...]) -> float:
    ids = tiny.tokens(model.config, len(rows), sum(rows[0]))
    expected = alone(model, ids, *rows)
    with autopack.enable(model, verify=False):
        start = tiny.first_position(model.config)
        found = model(input_ids=ids, position_ids=positions(*rows, start=start)).logits
    return error(found, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_inkling_scales_queries_by_their_place_in_the_document(implementation, monkeypatch):
    model = tiny.build("inkling_text", attn_implementation=implementation, **INKLING)
    assert packed_error(model, *ROWS) < FLOAT32  # its experts know no float64
    without(monkeypatch, recurrent.SHORT_CONVOLUTION, adjustments={})
    assert packed_error(model, *ROWS) > LEAK


def test_gradients_of_inklings_scaled_queries():
    model = tiny.build("inkling_text", **INKLING)
    ids = tiny.tokens(model.config, 2, sum(ROWS[0]))
    expected = alone(model, ids, *ROWS)
    weights = weights_like(expected)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    with autopack.enable(model, verify=False):
        (model(input_ids=ids, position_ids=positions(*ROWS)).logits * weights).sum().backward()
    assert gradient_error(gradients(model), wanted) < 10 * FLOAT32


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gpt2_that_reorders_and_upcasts(implementation, monkeypatch):
    model = tiny.build("gpt2", attn_implementation=implementation, **REORDERED)
    assert packed_error(model, *ROWS) < FLOAT32  # the method itself computes in float32
    if implementation == "eager":
        without(monkeypatch, quirks.GPT2, sites=())
        with pytest.raises(TypeError):
            packed_error(model, *ROWS)


def test_attention_weights_of_gpt2_that_reorders_and_upcasts():
    model = tiny.build("gpt2", **REORDERED)
    ids = tiny.tokens(model.config, 1, 12)
    wanted = [model(input_ids=part, output_attentions=True).attentions for part in (ids[:, :7], ids[:, 7:])]
    with autopack.enable(model, verify=False):
        found = model(input_ids=ids, position_ids=positions((7, 5)), output_attentions=True).attentions
    for layer, (first, second) in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(layer[:, :, :7, :7], first)
        torch.testing.assert_close(layer[:, :, 7:, 7:], second)
        assert not layer[:, :, 7:, :7].any()


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_reformer_with_chunks_of_more_than_a_token(task, monkeypatch):
    """Upstream pads documents to whole chunks, which it can do beside no positions."""
    model = tiny.build("reformer", task=task, dtype=torch.float64, **CHUNKS)
    assert packed_error(model, *ROWS) < FLOAT64
    plain = {name: OneByOne("of chunks") for name, way in whole_model.WHOLE_MODEL.mixers.items() if "Reformer" in name}
    without(monkeypatch, whole_model.WHOLE_MODEL, mixers=plain)
    with pytest.raises(RuntimeError):
        packed_error(model, *ROWS)


def test_reformer_with_hashes_drawn_anew_is_refused():
    model = tiny.build("reformer", hash_seed=None)
    ids = tiny.tokens(model.config, 1, 9)
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    with refused("cannot-be-packed", match="hashes are drawn anew at every call"):
        autopack.enable(model)
    local = tiny.build("reformer", hash_seed=None, attn_layers=["local", "local"], dtype=torch.float64)
    assert packed_error(local, *ROWS) < FLOAT64


@pytest.mark.parametrize("model_type", ["bert", "big_bird", "roformer", "convbert", "fnet", "nystromformer", "electra"])
def test_rows_longer_than_the_positions_of_a_model(model_type):
    model = tiny.build(model_type, task="masked-lm", max_position_embeddings=12, dtype=torch.float64)
    assert packed_error(model, *ROWS) < FLOAT64
    with pytest.raises((RuntimeError, IndexError)):
        model(input_ids=tiny.tokens(model.config, 1, 33))  # stock takes no such row


def test_rows_longer_than_the_positions_of_a_model_need_help(monkeypatch):
    fnet = tiny.build("fnet", task="masked-lm", max_position_embeddings=12)
    monkeypatch.setattr(packed, "_add_token_types", lambda *args: None)
    with pytest.raises(RuntimeError):
        packed_error(fnet, *ROWS)
    table = {"RoFormerSinusoidalPositionalEmbedding"}
    without(
        monkeypatch,
        own_attention.ROFORMER,
        mixers={k: v for k, v in own_attention.ROFORMER.mixers.items() if k not in table},
    )
    with pytest.raises(IndexError):
        packed_error(tiny.build("roformer", task="masked-lm", max_position_embeddings=12), *ROWS)


@pytest.mark.parametrize("model_type", ["bert", "roformer", "big_bird"])
def test_padding_longer_than_the_positions_of_a_model(model_type):
    model = tiny.build(model_type, task="masked-lm", max_position_embeddings=12, dtype=torch.float64)
    ids = tiny.tokens(model.config, 1, 50)
    expected = alone(model, ids[:, :19], (7, 12))
    segments = torch.tensor([1] * 7 + [2] * 12 + [0] * 31)[None]
    with autopack.enable(model, verify=False):
        found = model(input_ids=ids, attention_mask=segments).logits
    assert error(found[:, :19], expected) < FLOAT64


def test_a_run_of_padding_is_cut_to_the_length_of_documents():
    starts, real = torch.zeros(1, 20, dtype=torch.bool).numpy(), torch.ones(1, 20, dtype=torch.bool).numpy()
    starts[0, [0, 4, 7]] = True
    real[0, 7:] = False
    layout = PackedLayout.from_starts(starts, torch.device("cpu"), None, real)
    assert layout.lengths == (4, 3, 4, 4, 4, 1)
    assert layout.is_padding.tolist() == [False, False, True, True, True, True]
    short = PackedLayout.from_starts(starts[:, :9], torch.device("cpu"), None, real[:, :9])
    assert short.lengths == (4, 3, 2)


@pytest.mark.parametrize("token_dropout", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_esm_scales_embeddings_by_the_mask_tokens_of_the_document(implementation, token_dropout, monkeypatch):
    def masked_error() -> float:
        model = tiny.build(
            "esm",
            task="masked-lm",
            token_dropout=token_dropout,
            attn_implementation=implementation,
            dtype=torch.float64,
        )
        ids = tiny.tokens(model.config, 2, sum(ROWS[0]))
        ids[:, [1, 3, 5, 14]] = model.config.mask_token_id
        expected = alone(model, ids, *ROWS)
        with autopack.enable(model, verify=False):
            start = tiny.first_position(model.config)
            return error(model(input_ids=ids, position_ids=positions(*ROWS, start=start)).logits, expected)

    assert masked_error() < FLOAT64
    without(monkeypatch, quirks.ESM, mixers={})
    assert masked_error() > LEAK if token_dropout else masked_error() < FLOAT64


def test_gradients_and_padded_batches_of_esm():
    stock = tiny.build("esm", task="masked-lm", dtype=torch.float64)
    model = tiny.build("esm", task="masked-lm", dtype=torch.float64)
    ids = tiny.tokens(model.config, 2, 12)
    ids[:, [2, 3]] = model.config.mask_token_id
    mask = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    ids[mask == 0] = model.config.pad_token_id
    labels = torch.where(mask == 1, ids, -100)
    expected = stock(input_ids=ids, attention_mask=mask, labels=labels)
    expected.loss.backward()
    with autopack.enable(model, verify=False):
        found = model(input_ids=ids, attention_mask=mask, labels=labels)
        found.loss.backward()
    assert abs(float(found.loss - expected.loss)) < FLOAT64
    assert error(found.logits[mask == 1], expected.logits[mask == 1]) < FLOAT64
    wanted = gradients(stock)
    largest = max(float(gradient.abs().max()) for gradient in wanted)  # those of key biases are but rounding
    assert all((f - w).abs().max() < FLOAT64 * largest for f, w in zip(gradients(model), wanted, strict=True))


def test_a_model_whose_own_cache_is_broken_is_audited_without_it():
    """Stock xLSTM of these widths raises wherever it keeps its states; packed rows keep none."""
    model = tiny.build("xlstm")
    with pytest.raises((RuntimeError, ValueError)):
        [model(input_ids=tiny.tokens(model.config, 1, length)) for length in (13, 6)]
    with autopack.enable(model, verify=False):
        report = autopack.audit(model, modes=("two rows",), training=(False,), gradients=False)
    assert report.exact
