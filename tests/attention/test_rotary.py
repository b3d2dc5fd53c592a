"""Frequencies chosen by the longest position of the row are chosen per document instead: longrope
and dynamic NTK."""

import copy
import sys
import threading

import pytest
import torch

import autopack
from autopack import tiny
from autopack.calls import entry
from tests.conftest import (
    FLOAT64,
    LEAK,
    error,
    positions,
    token_ids,
)
from tests.engine import numbered
from tests.subjects import build as build_exact
from tests.support.padded import packs_at_once

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
# Documents are shorter and longer than the 8 positions that the models were "trained" on; 16 and 12
# are rescaled differently by dynamic NTK.
ROWS = ((5, 16, 8, 12), (12, 4, 9, 16))
IDS = token_ids(2, sum(ROWS[0]))
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
MODELS = {
    "phi3 longrope": lambda: _build("phi3", rope_type="longrope", factor=8.0, **FACTORS),
    "llama dynamic NTK": lambda: _build("llama", rope_type="dynamic", factor=4.0),
}


def _build(model_type, **rope):
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 8, **rope}
    return tiny.build(
        model_type,
        attn_implementation="sdpa",
        dtype=torch.float64,
        rope_parameters=rope,
        max_position_embeddings=64 if rope["rope_type"] == "longrope" else 8,
        original_max_position_embeddings=8,
    )


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def build(request):
    return request.param


def _alone(build, ids, *rows):
    """Each document in a model of its own: dynamic NTK remembers the longest sequence that it has
    seen."""
    found = [
        [build()(part[None]).logits for part in each.split(row)]
        for each, row in zip(ids, rows, strict=True)
    ]
    return torch.cat([torch.cat(row, dim=1) for row in found])


@pytest.mark.parametrize("rows", [ROWS, [(16, 9, 12)]], ids=["short and long", "all long"])
def test_packed_rows_with_short_and_long_documents_are_exact(build, rows):
    """Dynamic NTK keeps the frequencies of the longest document of a row until it sees a short
    one."""
    ids = token_ids(len(rows), sum(rows[0]))
    model, expected = build(), _alone(build, ids, *rows)
    with autopack.enable(model):
        for _ in range(2):
            assert (
                error(model(input_ids=ids, position_ids=positions(*rows)).logits, expected)
                <= FLOAT64
            )
        numbers = torch.cat([numbered(row) for row in rows])
        assert error(model(input_ids=ids, seq_idx=numbers).logits, expected) <= FLOAT64


@pytest.mark.parametrize("columns", [6, 12], ids=["short", "long"])
def test_a_packed_call_does_not_change_what_an_unpacked_one_sees(build, columns):
    """A short one makes dynamic NTK forget by itself what the packed row has set, a long one does
    not."""
    model, stock = build(), build()
    with autopack.enable(model):
        model(input_ids=IDS, position_ids=positions(*ROWS))
        assert torch.equal(
            model(input_ids=IDS[:, :columns]).logits, stock(input_ids=IDS[:, :columns]).logits
        )


@pytest.mark.parametrize(
    "found", [True, False], ids=["positions reach the backbone", "positions are lost"]
)
@pytest.mark.parametrize("lengths", [(13, 6), (3, 12, 4)])
def test_a_head_that_takes_positions_and_does_not_pass_them_on(lengths, found, monkeypatch):
    """Falcon's token classification takes any argument; its rotary positions are relative, but
    dynamic NTK is not."""
    if not found:
        monkeypatch.setattr(entry, "_has_position_ids", lambda model: True)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    overrides = {
        "rope_parameters": rope,
        "max_position_embeddings": 8,
        "alibi": False,
        "dtype": torch.float64,
    }
    model = tiny.build(
        "falcon", task="token-classification", attn_implementation="sdpa", **overrides
    ).eval()
    ids = tiny.tokens(model.config, 1, sum(lengths))
    expected = torch.cat([model(document).logits for document in ids.split(lengths, 1)], 1)
    with autopack.enable(model, verify=False):
        off = error(model(input_ids=ids, position_ids=positions(lengths)).logits, expected)
    assert off < FLOAT64 if found else off > LEAK


def test_threads_that_share_a_model_have_frequencies_of_their_own():
    """A rotary module keeps what it has computed for the longest position; two calls at once would
    share it."""
    build, rows = MODELS["llama dynamic NTK"], ((16, 9, 12), (37,))
    ids = token_ids(1, 37)
    model, expected, failed = build(), _alone(build, ids, rows[0]), []

    def work(number):
        for _ in range(40):
            logits = model(input_ids=ids, position_ids=positions(rows[number])).logits
            if number == 0 and error(logits, expected) > FLOAT64:
                failed.append(error(logits, expected))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with autopack.enable(model), torch.no_grad():
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=600)
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


def test_documents_that_lose_the_columns_before_them_keep_their_padding():
    """A recurrence numbers them from their first tokens, and then the longest position is another
    one than in stock."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    stock = build_exact("bailing_hybrid", rope_parameters=rope, max_position_embeddings=8)
    ours, mask = copy.deepcopy(stock), torch.ones(2, 14, dtype=torch.long)
    mask[0, 11:], mask[1, :6] = 0, 0
    batch = {
        "input_ids": tiny.tokens(ours.config, 2, 14),
        "attention_mask": mask,
        "use_cache": False,
    }
    expected, real = stock(**batch).logits, batch["attention_mask"].bool()
    with packs_at_once(ours):
        assert error(ours(**batch).logits[real], expected[real]) <= FLOAT64
