"""Attention in a model's own code, as releases before 4.48 and models from elsewhere have it: found by what it does.

One small decoder in the forms that transformers 4.44 to 4.57 has them: positions by column, tables of rotations cut to
the tokens of a call, masks of several shapes, a bias that layers hand on. No family names any of it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

import autopack
from autopack import registry
from autopack.inspection import source
from autopack.mixers import RELATIVE
from autopack.registry import Family
from tests.conftest import FLOAT64, LEAK, alone, alone_loss, error, gradients, positions, token_ids, weights_like
from tests.support.older_code import (
    Biased,
    ByColumns,
    ByTable,
    Forgetful,
    HandingOnToTheLoss,
    InAKernel,
    OldAttention,
    OldBiasAttention,
    OldEmbeddings,
    OldForCausalLM,
    OldKernelAttention,
    OldPositionalTable,
    OldRotary,
    PairsForAll,
    QueriesFirst,
    Rotating,
)
from tests.support.refusals import refused, refused_by_its_first_call

ROWS = ((7, 1, 9, 3), (2, 14, 4))

FORMS = [ByTable, HandingOnToTheLoss, ByColumns, InAKernel, PairsForAll, QueriesFirst, Rotating, Biased]


@pytest.fixture(autouse=True, scope="module")
def of_biases():
    """The way of T5, which a family has to name: nothing in the code says that a bias is handed on."""
    family = Family("biases", frozenset({"old-biased"}), "bias", mixers={"OldBiasAttention": RELATIVE}, positions=False)
    registry.register(family)
    yield
    registry._registered.remove(family)


def build(kind) -> OldForCausalLM:
    torch.manual_seed(0)
    model = kind(kind.config_class(pad_token_id=0)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model.eval()


def packed(rows=ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = token_ids(len(rows), sum(rows[0]), seed)
    return {"input_ids": ids, "position_ids": positions(*rows)}


def leak_of_stock(model: OldForCausalLM, row: dict[str, torch.Tensor], expected: torch.Tensor) -> float:
    taken = {n: v for n, v in row.items() if n == "input_ids" or isinstance(model, Rotating)}
    return error(model(**taken).logits, expected)


@pytest.mark.parametrize("kind", FORMS)
def test_documents_of_packed_rows_get_what_they_get_alone(kind):
    model, row = build(kind), packed()
    expected = alone(model, row["input_ids"], *ROWS)
    wanted_loss = alone_loss(model, row["input_ids"], *ROWS)
    weights = weights_like(expected)
    (expected * weights).sum().backward()
    wanted = gradients(model)
    assert leak_of_stock(model, row, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "by a twin of " in handle.verified
        found = model(**row).logits
        assert error(found, expected) < FLOAT64
        (found * weights).sum().backward()
        assert max(error(a, b) for a, b in zip(gradients(model), wanted, strict=True)) < 1e-8  # of sums of many
        assert abs(float(model(**row, labels=row["input_ids"]).loss / wanted_loss) - 1) < 1e-9
    assert leak_of_stock(model, row, expected) > LEAK


@pytest.mark.parametrize("kind", FORMS)
def test_another_document_changes_nothing(kind):
    model, row = build(kind), packed()
    with autopack.enable(model):
        before = model(**row).logits
        row["input_ids"][0, 8:17] = row["input_ids"][1, 8:17]  # the third document of the first row
        after = model(**row).logits
    changed = (before - after).abs().amax(-1)
    assert float(changed[0, 8:17].max()) > LEAK
    changed[0, 8:17] = 0
    assert float(changed.max()) < FLOAT64


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind is not PairsForAll])  # which takes no padding mask
def test_padded_batches_are_those_of_stock(kind, side):
    model, lengths = build(kind), (5, 12, 9)
    ids = token_ids(3, 12)
    mask = torch.stack([(torch.arange(12) < n).long() for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    batch = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    batch["labels"] = ids.masked_fill((mask == 0) | (nn.functional.pad(mask, (1, 0))[:, :-1] == 0), -100)
    stock = model(**batch)
    with autopack.enable(model):
        found = model(**batch)
    assert error(found.logits[mask.bool()], stock.logits[mask.bool()]) < FLOAT64
    assert abs(float(found.loss / stock.loss) - 1) < 1e-9


@pytest.mark.exhaustive
@settings(max_examples=12)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.sampled_from(FORMS), st.integers(0, 99))
def test_any_layout(lengths, kind, seed):
    model, row = build(kind), packed((tuple(lengths),), seed)
    expected = alone(model, row["input_ids"], tuple(lengths))
    with autopack.enable(model):
        assert error(model(**row).logits, expected) < FLOAT64


@pytest.mark.parametrize("kind", [ByTable, InAKernel, Rotating])
def test_without_looking_at_the_code_the_model_is_refused(kind, monkeypatch):
    monkeypatch.setattr("autopack.inspection.modules.attends_by_itself", lambda cls: False)
    with refused("cannot-be-packed", match="no place to keep documents apart"):
        autopack.enable(build(kind))


def test_where_positions_are_not_counted_anew_the_audit_refuses(monkeypatch):
    monkeypatch.setattr("autopack.inspection.modules.counting_columns", lambda root, mixers: ([], []))
    with refused("not-exact"):
        autopack.enable(build(ByTable))


def test_a_bias_that_is_not_handed_on_is_refused():
    refused_by_its_first_call(build(Forgetful))


def test_rotations_that_are_cut_are_seen_in_the_code():
    assert source.cuts_rotations(OldAttention)
    assert source.cuts_rotations(OldKernelAttention)  # by the forward above it
    assert not source.cuts_rotations(OldBiasAttention)


@pytest.mark.parametrize("cls", [OldPositionalTable, OldEmbeddings, OldRotary, OldForCausalLM, nn.Linear])
def test_what_does_not_weigh_tokens_is_no_attention(cls):
    assert not source.attends_by_itself(cls)


class Mine(nn.Module):
    """Attention without rotations, as somebody writes it."""

    def __init__(self, size: int):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        query, key, value = self.qkv(hidden_states).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ value, None


def llama_with(attention: nn.Module) -> PreTrainedModel:
    model = autopack.tiny.build("llama", dtype=torch.float64)
    model.model.layers[1].self_attn = attention.double()
    return model


def test_a_users_attention_in_a_layer_of_llama_is_served_and_checked():
    model = llama_with(Mine(64))
    row = packed()
    expected = alone(model, row["input_ids"], *ROWS)
    assert error(model(**row, use_cache=False).logits, expected) > LEAK
    with autopack.enable(model) as handle:
        assert "but for Mine: its calls are checked closely" in handle.verified
        assert error(model(**row).logits, expected) < FLOAT64
        assert handle.checked.checks == 1


def test_a_users_attention_that_nothing_can_stand_at_is_refused():
    class Inside(Mine):
        """A class that is not found by its name."""

        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs)

    refused_by_its_first_call(llama_with(Inside(64)))
