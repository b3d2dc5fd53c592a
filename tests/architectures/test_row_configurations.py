"""Configurations in which models look at the row in another way than as they come: exact, and not
without what makes them so."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import autopack
from autopack import registry, tiny
from autopack.architectures import own_attention, recurrent, whole_model
from autopack.mixers import OneByOne
from tests.engine import Call, must_be_exact
from tests.subjects import build
from tests.support.refusals import refused

ROW = Call(lengths=(7, 12, 5, 9)).row
INKLING = {"log_scaling_n_floor": 4}
REORDERED = {"reorder_and_upcast_attn": True}
CHUNKS = {"lsh_attn_chunk_length": 4, "lsh_num_chunks_before": 1, "local_attn_chunk_length": 4}
CHUNKS |= {"local_num_chunks_before": 1}


def without(monkeypatch, family, **parts):
    """Serve the types of a family without some of what it has."""
    monkeypatch.setattr(registry, "_registered", [dataclasses.replace(family, **parts)])


def leaks_without(monkeypatch, family, make, calls, **parts):
    """Want documents to see each other where a family has not all that it has."""
    without(monkeypatch, family, **parts)
    with pytest.raises(AssertionError, match="silently wrong"):
        must_be_exact(make, calls, verify=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_inkling_scales_queries_by_their_place_in_the_document(implementation, monkeypatch):
    # its experts know no float64
    make = partial(tiny.build, "inkling_text", attn_implementation=implementation, **INKLING)
    must_be_exact(make, ROW, verify=False)
    family = recurrent.SHORT_CONVOLUTION
    mixers = {name: way for name, way in family.mixers.items() if name != "InklingAttention"}
    leaks_without(monkeypatch, family, make, ROW, mixers=mixers)


def test_gpt2_that_reorders_and_upcasts_is_refused_where_it_does():
    """Only its eager attention reads that field."""
    must_be_exact(
        partial(tiny.build, "gpt2", attn_implementation="sdpa", **REORDERED), ROW, verify=False
    )
    with refused("cannot-be-packed", match="attn_implementation='sdpa'"):
        autopack.enable(tiny.build("gpt2", attn_implementation="eager", **REORDERED), verify=False)


@torch.no_grad()
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
def test_reformer_with_chunks_of_more_than_a_token(task, monkeypatch):
    """Upstream pads documents to whole chunks, which it can do beside no positions."""
    make, calls = (
        partial(build, "reformer", task, **CHUNKS),
        Call(labels=None, lengths=(7, 12, 5, 9)).row,
    )
    must_be_exact(make, calls, verify=False)
    plain = {
        name: OneByOne("of chunks")
        for name, way in whole_model.WHOLE_MODEL.mixers.items()
        if "Reformer" in name
    }
    without(monkeypatch, whole_model.WHOLE_MODEL, mixers=plain)
    with pytest.raises(RuntimeError):
        must_be_exact(make, calls, verify=False)


def test_reformer_with_hashes_drawn_anew_is_refused():
    model = tiny.build("reformer", hash_seed=None)
    ids = tiny.tokens(model.config, 1, 9)
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    with refused("cannot-be-packed"):
        autopack.enable(model)
    with torch.no_grad():
        make = partial(build, "reformer", hash_seed=None, attn_layers=["local", "local"])
        must_be_exact(make, Call(labels=None).row, verify=False)


@dataclass(frozen=True)
class Masked(Call):
    """Some of the tokens are mask tokens."""

    def run(self, model, arguments):
        ids = arguments["input_ids"]
        masked = ids.masked_fill(ids % 3 == 1, model.config.mask_token_id)
        return super().run(model, arguments | {"input_ids": masked})


@pytest.mark.parametrize("token_dropout", [True, False])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_esm_scales_embeddings_by_the_mask_tokens_of_the_document(
    implementation, token_dropout, monkeypatch
):
    make = partial(
        build, "esm", "masked-lm", token_dropout=token_dropout, attn_implementation=implementation
    )
    call = Masked(shifts=False, lengths=(7, 12, 5, 9))
    must_be_exact(make, call.both, verify=False)
    if token_dropout:
        leaks_without(monkeypatch, own_attention.ESM, make, call.row, mixers={})


def test_a_model_whose_own_cache_is_broken_is_audited_without_it():
    """Stock xLSTM of these widths raises wherever it keeps its states; packed rows keep none."""
    model = tiny.build("xlstm")
    with pytest.raises((RuntimeError, ValueError)):
        [model(input_ids=tiny.tokens(model.config, 1, length)) for length in (13, 6)]
    with autopack.enable(model, verify=False):
        report = autopack.audit(model, modes=("two rows",), training=(False,), gradients=False)
    assert report.exact
