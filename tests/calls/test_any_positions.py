"""Documents that seq_idx declares, with positions that do not count on by one in them: each has exactly its own."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from autopack.layout.declarations import read
from tests.conftest import FLOAT32, FLOAT64, LEAK, LENGTHS, error, gradients, llama, spans, token_ids
from tests.support.refusals import refused

IDS = token_ids()
SEQ_IDX = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
CPU = torch.device("cpu")


def _row(of_length):
    return torch.cat([of_length(length) for length in LENGTHS])[None]


POSITIONS = {
    "reversed": _row(lambda n: torch.arange(n).flip(0)),
    "strided": _row(lambda n: torch.arange(n) * 3),
    "shuffled": _row(lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(n))),
    "far away": _row(lambda n: torch.arange(n) * 2 + 20),
    "there and back": _row(lambda n: (torch.arange(n) - n // 2).abs()),
    "reversed throughout": torch.arange(sum(LENGTHS)).flip(0)[None],
}
TYPES = ["llama", "gpt2", "gpt_neox", "gptj", "opt", "bamba", "mistral", "gemma3_text", "roberta", "qwen2"]
CASES = [(kind, "reversed") for kind in TYPES] + [("llama", name) for name in POSITIONS]


def _alone(model, ids, where):
    """Logits and mean loss of each document alone; without a mask stock would cut it where positions do not count."""
    logits, losses = [], []
    for a, b in spans(LENGTHS):
        given = {"input_ids": ids[:, a:b], "labels": ids[:, a:b], "position_ids": where[:, a:b]}
        found = model(**given, attention_mask=torch.ones(1, b - a).long(), use_cache=False)
        logits.append(found.logits)
        losses.append(found.loss * (b - a - 1))
    return torch.cat(logits, 1), sum(losses) / (sum(LENGTHS) - len(LENGTHS))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_documents_have_the_positions_that_they_are_given(kind, name):
    model, stock = (tiny.build(kind, dtype=torch.float64).eval() for _ in range(2))
    ids = tiny.tokens(model.config, *IDS.shape)
    where = POSITIONS[name] + 2 * (kind == "roberta")
    expected, loss = _alone(stock, ids, where)
    call = {"input_ids": ids, "position_ids": where, "seq_idx": SEQ_IDX, "labels": ids}
    with autopack.enable(model, check_every=1):
        found = model(**call)
        # State space layers compute in float32 whatever the dtype is.
        assert error(found.logits, expected) < (FLOAT32 if kind == "bamba" else FLOAT64)
        assert float(found.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
        found.loss.backward()
    loss.backward()
    ours, theirs = (torch.cat([gradient.flatten() for gradient in gradients(which)]) for which in (model, stock))
    assert error(ours, theirs) < FLOAT32  # transformers has the loss in float32
    leaking = stock(input_ids=ids, position_ids=where, attention_mask=torch.ones_like(ids)).logits
    assert error(leaking, expected) > LEAK


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_frequencies_are_those_of_the_largest_position_of_each_document(scaling):
    half = 8
    factors = {"short_factor": [1.0] * half, "long_factor": [float(n + 2) for n in range(half)]}
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
    rope |= factors if scaling == "longrope" else {}
    changed = {"rope_scaling": rope, "max_position_embeddings": 24 if scaling == "dynamic" else 96}
    model, stock = (llama(**changed) for _ in range(2))
    where = POSITIONS["strided"].clone()
    expected, _ = _alone(stock, IDS, where)
    with autopack.enable(model, verify=False):
        found = model(input_ids=IDS, position_ids=where, seq_idx=SEQ_IDX).logits
    assert error(found, expected) < FLOAT64


def test_a_row_of_one_document_is_one_document():
    model, stock = llama(), llama()
    where = torch.arange(sum(LENGTHS)).flip(0)[None]
    expected = stock(input_ids=IDS, position_ids=where, attention_mask=torch.ones_like(IDS)).logits
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=where, seq_idx=torch.zeros_like(IDS)).logits
        assert error(found, expected) < FLOAT64


def test_padding_may_have_any_positions():
    model, stock = llama(), llama()
    where, mask = POSITIONS["reversed"].clone(), torch.ones_like(IDS)
    mask[:, -LENGTHS[-1] :] = 0
    expected, _ = _alone(stock, IDS, where)
    where[:, -LENGTHS[-1] :] = 77
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=where, seq_idx=SEQ_IDX, attention_mask=mask).logits
    real = sum(LENGTHS[:-1])
    assert error(found[:, :real], expected[:, :real]) < FLOAT64


@pytest.mark.parametrize(
    "row",
    [
        [0, 1, 2, 3, 0, 1, 2, 3],  # begins anew one token after seq_idx says so
        [0, 1, 2, 3, 4, 5, 6, 7],
        [5, 6, 7, 8, 9, 5, 6, 7],
    ],
)
def test_positions_that_count_still_have_to_agree(row):
    given = {"position_ids": torch.tensor([row]), "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])}
    with refused("documents-unclear", match="two declarations disagree"):
        read(given, (1, 8), CPU, any_positions=True)


def test_models_that_read_positions_otherwise_refuse_them():
    call = {"input_ids": IDS, "position_ids": POSITIONS["reversed"], "seq_idx": SEQ_IDX}
    head = tiny.build("llama", task="sequence-classification", dtype=torch.float64)
    for model in (head, tiny.build("llama4_text", dtype=torch.float64)):
        with autopack.enable(model), refused("documents-unclear", match="two declarations disagree"):
            model(**call)
