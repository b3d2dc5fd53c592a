"""Attention masks of four dimensions that the caller has prepared, beside positions that declare documents."""

from __future__ import annotations

import pytest
import torch

import autopack
from autopack import tiny
from autopack.layout import prepared
from autopack.layout.packed import PackedLayout
from autopack.layout.prepared import Agreement, agreement
from tests.conftest import FLOAT64, LENGTHS, alone, error, llama, positions, token_ids

IDS = token_ids(2)
ROWS = (LENGTHS, (20, 13))
POSITIONS = positions(*ROWS)
LAYOUT = PackedLayout.from_lengths([list(row) for row in ROWS])


def together() -> torch.Tensor:
    """Which tokens are of one document, (rows, 1, columns, columns)."""
    return (LAYOUT.seq_idx[:, :, None] == LAYOUT.seq_idx[:, None, :])[:, None]


def added(seen: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A mask that is added to the scores."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def padded(seen: torch.Tensor) -> torch.Tensor:
    """The same, where the last document of the first row is padding that sees nothing."""
    seen = seen.clone()
    seen[0, :, -LENGTHS[-1] :] = False
    return seen


FORMS = {"bool": lambda seen: seen, "added": added, "minus infinity": lambda s: added(s).masked_fill(~s, -torch.inf)}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_what_a_mask_says(form):
    assert agreement(form(together().tril()), LAYOUT) is Agreement.SAME
    assert agreement(form(padded(together().tril())), LAYOUT) is Agreement.SAME
    assert agreement(form(together()), LAYOUT) is Agreement.APART
    assert agreement(form(together().tril().triu(-3)), LAYOUT) is Agreement.APART
    assert agreement(form(torch.ones_like(together()).tril()), LAYOUT) is Agreement.CROSSES
    heads = form(together().tril().expand(-1, 4, -1, -1))
    assert agreement(heads, LAYOUT) is Agreement.SAME


def test_a_bias_is_more_than_a_mask():
    assert agreement(added(together().tril()) - 0.5, LAYOUT) is Agreement.APART


def test_what_cannot_be_read():
    shape = (2, sum(LENGTHS))
    assert not prepared.is_readable(torch.ones(2, 33), shape)
    assert not prepared.is_readable(torch.ones(2, 1, 33, 40), shape)
    assert not prepared.is_readable(torch.ones(2, 1, 33, 33, dtype=torch.long), shape)
    assert not prepared.is_readable({"full_attention": None}, shape)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_of_the_documents_is_served(implementation, form):
    model, stock = (llama(implementation) for _ in range(2))
    call = {"input_ids": IDS, "position_ids": POSITIONS, "labels": IDS}
    mask = form(together().tril())
    with autopack.enable(model) as handle:
        found = model(**call, attention_mask=mask)
        assert error(found.logits, alone(stock, IDS, *ROWS)) < FLOAT64
        if implementation == "sdpa":  # eager adds a bool mask, and its softmax over a longer row rounds otherwise
            assert error(found.logits, stock(**call, attention_mask=mask).logits) < FLOAT64
        assert float(found.loss) == pytest.approx(float(model(**call).loss), abs=FLOAT64)
        assert handle.verified


def test_padding_in_it_is_padding():
    model, stock = llama(), llama()
    mask = padded(together().tril())
    given = POSITIONS.clone()
    given[0, -LENGTHS[-1] :] = 0
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=given, attention_mask=mask).logits
    expected = alone(stock, IDS, *ROWS)
    real = mask.diagonal(dim1=2, dim2=3)[:, 0]
    assert error(found[real], expected[real]) < FLOAT64


def test_one_that_keeps_documents_apart_in_its_own_way_is_left_to_stock():
    model, stock = llama(), llama()
    call = {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": together()}
    with autopack.enable(model):
        assert torch.equal(model(**call).logits, stock(**call).logits)
        layers = {"full_attention": together().tril()}  # as the model itself prepares them for its layers
        call = {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": layers}
        assert _said(model, call) == _said(stock, call)


def _said(model, call):
    try:
        return model(**call).logits.sum().item()
    except AttributeError as error:  # a model whose layers are all alike takes no dict
        return str(error)


def test_one_that_lets_documents_see_each_other_contradicts_them():
    model = llama()
    with (
        autopack.enable(model),
        pytest.raises(autopack.InvalidPacking, match="lets documents see each other that the call declares"),
    ):
        model(input_ids=IDS, position_ids=POSITIONS, attention_mask=torch.ones_like(together()).tril())


def test_without_documents_it_is_nobodys_business():
    model, stock = llama(), llama()
    call = {"input_ids": IDS, "attention_mask": torch.ones_like(together()).tril().triu(-5)}
    with autopack.enable(model):
        assert torch.equal(model(**call).logits, stock(**call).logits)


def test_a_mixer_that_no_mask_reaches_is_refused():
    model = tiny.build("bamba", attn_implementation="sdpa")
    ids = tiny.tokens(model.config, *IDS.shape)
    call = {"input_ids": ids, "position_ids": POSITIONS, "attention_mask": together()}
    with autopack.enable(model), pytest.raises(autopack.UnsupportedModel, match="mixes tokens past a prepared"):
        model(**call)
